"""What every bench needs besides its measurement: flags for its files, the engine, a progress bar, the report."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vidspec_models.request import SpeculationMode
from vidspec_service.arguments import new_file, new_picture
from vidspec_service.bench.common.environment import Provenance
from vidspec_service.bench.common.options import add_options
from vidspec_service.bench.common.report import OnProgress, Report
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.cli.terminal import note
from vidspec_service.engine.config import EngineConfig
from vidspec_service.settings import engine_config
from vidspec_service.telemetry import configure_logging


def add_bench_flags(parser: argparse.ArgumentParser, options: type, plot: str | None = None) -> None:
    """What to measure, what to write, and the settings of what is measured."""
    add_options(parser, options)
    add_output_flags(parser, plot)
    add_settings_flags(parser)


def add_output_flags(parser: argparse.ArgumentParser, plot: str | None) -> None:
    """`--json`, and `--plot` where there is something to draw."""
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write all results to this file")
    if plot is not None:
        parser.add_argument("--plot", type=new_picture, metavar="FILE.png", help=plot)


def pair_of(args: argparse.Namespace) -> EngineConfig:
    """The engine with its draft, whatever `speculation` is set to: requests name their mode. Logs warnings only."""
    settings = settings_of(args).model_copy(update={"speculation": SpeculationMode.AUTO, "log_level": "warning"})
    configure_logging(settings.log_level, settings.log_format)
    return engine_config(settings)


def run_bench(args: argparse.Namespace, measure: Callable[[OnProgress], Report]) -> int:
    """Measure with a progress bar, write the files that flags name, print the report; returns the exit code."""
    with progress() as on_progress:
        provenance = Provenance.now(shlex.join(["vidspec", *sys.argv[1:]]))
        report = replace(measure(on_progress), provenance=provenance)
    try:
        report.write(vars(args))  # before it is printed: the reader of a pipe may end early
    finally:
        report.show()  # also where the disk is full
    if report.failure is not None:
        note(f"vidspec bench {report.bench}: {report.failure}")
        return 1
    return 0


@contextmanager
def progress() -> Iterator[OnProgress]:
    """A bar on a terminal's stderr, drawn only with each report: a thread that draws would disturb the timing."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("starting", total=None)

        def on_progress(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total or None, refresh=True)

        yield on_progress
