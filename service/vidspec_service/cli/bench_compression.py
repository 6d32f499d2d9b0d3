"""Measure DyCoke on the target: what fewer video tokens cost in accuracy and save in time and memory.

The target answers alone and greedily about rendered test clips whose truth is known. Each configuration runs in a
process of its own. DyCoke's L and P come from --dycoke-layer and --dycoke-hide-ratio; K from --ratios.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vidspec_service.bench.compression.options import CompressionOptions
from vidspec_service.cli.bench_output import command_line, deliver, progress, require_outputs
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.engine.types import Compression
from vidspec_service.errors import ConfigError

if TYPE_CHECKING:
    from vidspec_service.settings import Settings

_DEFAULTS = CompressionOptions()
_BASELINE = "none: the same target, prompt and seeds without compression, at as many frames"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, what to write, and the settings of the target."""
    parser.add_argument(
        "--clips", type=_count, default=_DEFAULTS.num_clips, metavar="N", help="test clips (default %(default)s)"
    )
    parser.add_argument(
        "--frames", type=_count, nargs="+", default=_DEFAULTS.frames, metavar="N", help="per clip (default 16 64)"
    )
    parser.add_argument(
        "--ratios", type=_ratio, nargs="+", default=_DEFAULTS.ratios, metavar="K", help="(default 0.3 0.5 0.7)"
    )
    parser.add_argument(
        "--max-tokens", type=_count, default=_DEFAULTS.max_tokens, metavar="N", help="per caption (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here, too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw accuracy against time and memory")
    add_settings_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from vidspec_models.spec import ModelSpec
    from vidspec_service.bench.compression.plot import save_plot
    from vidspec_service.bench.compression.report import CompressionReport, renderables
    from vidspec_service.bench.compression.results import results
    from vidspec_service.bench.compression.runs import measure
    from vidspec_service.bench.facts import hardware, load_average, now, versions

    require_outputs(args)
    settings = settings_of(args)
    options = compression_options(args, settings)
    threads = settings.target_threads or len(os.sched_getaffinity(0))
    spec = ModelSpec(
        path=settings.model,
        role="target",
        revision=settings.revision,
        device=settings.target_device,
        dtype=settings.target_dtype,
    )
    created, load_before = now(), load_average()
    with progress() as tell:
        measured, loaded = measure(options, spec, threads, tell)
    report = CompressionReport(
        created=created,
        command=command_line(),
        baseline=_BASELINE,
        hardware=hardware({loaded.device: loaded.device_name} if loaded.device_name else {}),
        versions=versions(),
        model=settings.model,
        device=loaded.device,
        dtype=loaded.dtype,
        threads=threads,
        clips=options.num_clips,
        max_tokens=options.max_tokens,
        load_average_before=load_before,
        results=results(measured),
    )
    deliver(args, report, renderables, save_plot)
    return 0


def compression_options(args: argparse.Namespace, settings: Settings) -> CompressionOptions:
    """The options that flags and settings make; raises ConfigError for a compression of all configurations."""
    from vidspec_service.settings import engine_config

    if settings.compression is not Compression.NONE:
        raise ConfigError("bench compression compares with and without: --compression has no place here")
    return CompressionOptions(
        num_clips=args.clips,
        frames=tuple(dict.fromkeys(args.frames)),
        ratios=tuple(dict.fromkeys(args.ratios)),
        dycoke=engine_config(settings).dycoke,
        max_tokens=args.max_tokens,
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 < value <= 0.99:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 0.99, not {text}")
    return value
