"""What every bench does around its measuring: flags for its files, the engine, a bar, the report."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vidspec_models.request import SpeculationMode
from vidspec_service.bench.common.report import Report, Tell, require_matplotlib
from vidspec_service.cli.settings_flags import settings_of
from vidspec_service.engine.config import EngineConfig
from vidspec_service.errors import ConfigError
from vidspec_service.settings import engine_config
from vidspec_service.telemetry import configure_logging


def add_output_flags(parser: argparse.ArgumentParser, plot: str | None = None) -> None:
    """`--json`, and `--plot` where there is something to draw."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here, too")
    parser.set_defaults(plot=None)
    if plot is not None:
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help=plot)


def pair_of(args: argparse.Namespace) -> EngineConfig:
    """The engine with its draft, whatever the settings say of speculation: requests name their mode. Logs little."""
    settings = settings_of(args).model_copy(update={"speculation": SpeculationMode.AUTO})
    configure_logging("warning", settings.log_format)
    return engine_config(settings)


def run_bench(args: argparse.Namespace, measure: Callable[[str, Tell], Report], *pictures: Path | None) -> Report:
    """Measure behind a bar; print the report and write the files that flags name. `measure` gets the command line.

    Minutes of measuring must not end in what cannot be written or drawn: raises ConfigError before. `pictures` are
    paths beside those of `--json` and `--plot`.
    """
    for path in (args.json, args.plot, *pictures):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {path}: {path.absolute().parent} is not a folder")
    if any((args.plot, *pictures)):
        require_matplotlib()
    with progress() as tell:
        report = measure(shlex.join(["vidspec", *sys.argv[1:]]), tell)
    report.show()
    report.write(vars(args))
    return report


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
