"""What every benchmark needs besides its measurement: an engine, a progress bar, a report."""

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
from vidspec_service.bench.common.environment import Provenance
from vidspec_service.bench.common.report import OnProgress, Report
from vidspec_service.cli.settings_flags import settings_of
from vidspec_service.cli.terminal import note
from vidspec_service.engine.config import EngineConfig
from vidspec_service.settings import Settings, engine_config
from vidspec_service.telemetry import configure_logging


def pair_of(args: argparse.Namespace) -> EngineConfig:
    """The engine with its draft, whatever `speculation` is set to: requests name their mode. Logs warnings only."""
    update = {"speculation": SpeculationMode.AUTO, "log_level": "warning"}
    settings = settings_of(Settings, args).model_copy(update=update)
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
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("starting", total=None)

        def on_progress(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total or None, refresh=True)

        yield on_progress
