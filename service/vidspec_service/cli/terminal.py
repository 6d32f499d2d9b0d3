"""The terminal: results go to stdout, everything said about them to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """One line of result."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """One line about the work: progress, a warning, an error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner while the block runs; nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(text, total=None)
        yield
