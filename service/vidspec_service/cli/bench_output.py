"""What every bench does around its measuring: check where it will write, show a bar, print its tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vidspec_service.bench.tell import Tell
from vidspec_service.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

_LEAST_WIDTH = 148  # a table that is wrapped by the terminal is still whole


def require_writable(*paths: Path | None) -> None:
    """Minutes of measuring must not end in a folder that is not there. Raises ConfigError."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: {path.absolute().parent} is not a folder")


def show(renderables: Iterable[RenderableType]) -> None:
    """To stdout, in a width that keeps tables whole."""
    from rich.console import Console

    console = Console(highlight=False, width=max(Console().width, _LEAST_WIDTH), soft_wrap=True)
    for renderable in renderables:
        console.print(renderable, markup=False)


@contextmanager
def progress() -> Iterator[Tell]:
    """A bar on a terminal's stderr, drawn when told something only: a thread that draws would disturb what is timed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("starting", total=None)

        def tell(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total or None, refresh=True)

        yield tell
