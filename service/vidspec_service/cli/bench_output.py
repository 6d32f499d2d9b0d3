"""What every bench does around its measuring: check where it will write, show a bar, print and write its report."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from vidspec_service.bench.tell import Tell
from vidspec_service.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

_LEAST_WIDTH = 148  # a table that is wrapped by the terminal is still whole


class Report(Protocol):
    """What a bench found."""

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        ...


R = TypeVar("R", bound=Report)


def require_outputs(args: argparse.Namespace, *pictures: Path | None) -> None:
    """Minutes of measuring must not end in what cannot be written or drawn. Raises ConfigError."""
    require_writable(args.json, args.plot, *pictures)
    if any(path is not None for path in (args.plot, *pictures)):
        from vidspec_service.bench.plots import require_matplotlib

        require_matplotlib()


def require_files(paths: Iterable[Path]) -> None:
    """Each is there to be read; raises ConfigError."""
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path} is not a file")


def command_line() -> str:
    """As it was typed, for the report."""
    return shlex.join(["vidspec", *sys.argv[1:]])


def deliver(
    args: argparse.Namespace,
    report: R,
    renderables: Callable[[R], Iterable[RenderableType]],
    save_plot: Callable[[R, Path], None],
) -> None:
    """Print the report, and write the files that --json and --plot name."""
    show(renderables(report))
    if args.json is not None:
        report.write(args.json)
    if args.plot is not None:
        save_plot(report, args.plot)


def require_writable(*paths: Path | None) -> None:
    """Each path's folder is there; raises ConfigError."""
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
