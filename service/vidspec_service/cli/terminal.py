"""The terminal: results go to stdout; progress, warnings and errors to stderr."""

from __future__ import annotations

import errno
import json
import logging
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vidspec_service.bench.common.report import OnProgress
    from vidspec_service.engine.frontend.local_engine import OnLoading

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EVERY_S = 10.0  # a log is read afterwards: enough to see that it goes on, and how fast
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # and not Cn: an emoji that is newer than this Python
_KEPT = "\n\t\u200c\u200d"  # in an answer; the last two join letters of Persian and Hindi, and parts of emoji

_log = logging.getLogger(__name__)


def say(text: str) -> None:
    """One line of result."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def printable_json(value: object, indent: int | None = 2) -> str:
    """The value as JSON, with JSON's own escape for what is not `printable`."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return text.translate({ord(each): json.dumps(each)[1:-1] for each in set(text) if not printable(each)})


def note(text: str) -> None:
    """One line about the work: progress, a warning, an error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def printable(text: str) -> str:
    """The text without control characters: a model may write any, such as an escape sequence that a terminal obeys."""
    return "".join(each for each in text if each in _KEPT or unicodedata.category(each) not in _OBEYED)


def waiting(text: str) -> AbstractContextManager[object]:
    """A spinner while the block runs; nothing where stderr is not a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(text)


@contextmanager
def progress() -> Iterator[OnProgress]:
    """A bar on a terminal's stderr, drawn only with each report: a thread that draws would disturb what is timed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("starting", total=None)

        def on_progress(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total or None, refresh=True)

        yield on_progress


@contextmanager
def loading_display() -> Iterator[OnLoading]:
    """Yields a callback for the workers' progress: a bar for each in a terminal, now and then a line in a log."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _loading_log()
        return
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {"": bars.add_task("starting the workers", total=None)}

        def tell(role: str, what: str, fraction: float | None) -> None:
            if "" in tasks:
                bars.remove_task(tasks.pop(""))
            if role not in tasks:
                tasks[role] = bars.add_task(role)
            total = None if fraction is None else 1.0
            bars.update(tasks[role], description=f"{role}: {what}", completed=fraction or 0.0, total=total)

        yield tell


def _loading_log() -> OnLoading:
    """A line for each worker now and then, and at once for a step of unknown length: nothing more is told meanwhile."""
    began, last = time.monotonic(), dict[str, float]()

    def tell(role: str, what: str, fraction: float | None) -> None:
        now = time.monotonic()
        if fraction is None or now - last.get(role, began) >= _EVERY_S:
            last[role] = now
            percent = None if fraction is None else round(100 * fraction)
            _log.info("still loading", extra={"worker": role, "step": what, "percent": percent})

    return tell
