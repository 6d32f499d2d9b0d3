"""Tell: how a measurement says where it stands, and the bar that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Tell = Callable[[str, int, int], None]  # what is going on, parts done, parts in all (0: unknown)


@contextmanager
def progress() -> Iterator[Tell]:
    """A bar on a terminal's stderr, drawn when told something only: a thread that draws would disturb what is timed."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("starting", total=None)

        def tell(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total or None, refresh=True)

        yield tell
