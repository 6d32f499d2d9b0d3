"""Compare the modes of decoding on the same prompts in the same run, next to stock transformers.

Every prompt goes through all modes before the next one does; speed-ups are relative to `off`, the target alone on all
cores. Exit code 1: the modes did not give the same token ids.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vidspec_models.synthetic.shapes import SHAPES
from vidspec_service.bench.options import Mode, SpeedOptions, SyntheticOptions, Task
from vidspec_service.cli.bench_output import progress, require_writable, show
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.cli.terminal import note
from vidspec_service.engine.types import EngineConfig, SamplingParams, SpeculationMode
from vidspec_service.errors import ConfigError
from vidspec_service.settings.derived import BUNDLED

if TYPE_CHECKING:
    from vidspec_service.bench.report import SpeedReport
    from vidspec_service.bench.speed import Measurements
    from vidspec_service.bench.tell import Tell

_DEFAULTS, _RANDOM = SpeedOptions(), SyntheticOptions()
_MODES = tuple(mode.value for mode in Mode)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, what to write, and the settings of the engine."""
    parser.add_argument(
        "--prompts", type=_count, default=_DEFAULTS.num_prompts, metavar="N", help="test clips (default %(default)s)"
    )
    parser.add_argument(
        "--task",
        choices=[task.value for task in Task if task is not Task.SYNTHETIC],
        default=_DEFAULTS.task.value,
        help="default %(default)s",
    )
    _add_synthetic_arguments(parser)
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=_MODES, help="only these (default all)")
    parser.add_argument(
        "--max-tokens", type=_count, default=_DEFAULTS.max_tokens, metavar="N", help="per answer (default %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling; prompt i has N + i (default 0)")
    parser.add_argument("--concurrency", type=_count, default=1, metavar="N", help="requests at once (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here, too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the speed-ups")
    parser.add_argument("--timeline", type=Path, metavar="FILE.png", help="draw one request's work on both workers")
    add_settings_flags(parser)


def _add_synthetic_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="measure the machinery apart from any checkpoint: random models of real shapes, acceptance imposed",
    )
    parser.add_argument("--shape", choices=list(SHAPES), help=f"of random models (default {_RANDOM.shape})")
    parser.add_argument(
        "--alpha", type=float, metavar="A", help=f"acceptance of random models (default {_RANDOM.acceptance})"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from vidspec_service.bench.plots import require_matplotlib
    from vidspec_service.bench.speed import build_report
    from vidspec_service.bench.tables import renderables
    from vidspec_service.settings import engine_config
    from vidspec_service.telemetry import configure_logging

    options = speed_options(args)
    require_writable(args.json, args.plot, args.timeline)
    if args.plot is not None or args.timeline is not None:
        require_matplotlib()
    settings = settings_of(args).model_copy(update={"speculation": SpeculationMode.AUTO})  # requests name their mode
    configure_logging("warning", settings.log_format)
    pair = _named(options, engine_config(settings))
    command = shlex.join(["vidspec", *sys.argv[1:]])
    with progress() as tell:
        measured = _measure(options, pair, tell)
    report = build_report(options, pair, measured, command)
    show(renderables(report))
    _write(args, report, measured)
    if report.identical is False:
        note("vidspec bench speed: the modes did not give the same token ids")
        return 1
    return 0


def _measure(options: SpeedOptions, pair: EngineConfig, tell: Tell) -> Measurements:
    from vidspec_service.bench.speed import measure_speed
    from vidspec_service.bench.synthetic import measure_synthetic

    if options.synthetic is not None:
        return measure_synthetic(options, pair, options.synthetic, tell)
    return measure_speed(options, pair, tell)


def _named(options: SpeedOptions, pair: EngineConfig) -> EngineConfig:
    """The pair with the names that the report gives its models."""
    if options.synthetic is None:
        return pair
    if pair.target.model != BUNDLED or pair.draft is None or pair.draft.model != BUNDLED:
        raise ConfigError("--random-weights makes its own models: leave out --model, --draft-model and --speculation")
    shapes = SHAPES[options.synthetic.shape]
    return replace(
        pair,
        target=replace(pair.target, model=f"random weights, shape of {shapes.target.source}"),
        draft=replace(pair.draft, model=f"random weights, shape of {shapes.draft.source}"),
    )


def speed_options(args: argparse.Namespace) -> SpeedOptions:
    """The options that the flags make; raises ConfigError for what cannot go together."""
    synthetic = _synthetic_options(args)
    modes = tuple(mode for mode in Mode if mode.value in args.modes)
    if args.timeline is not None and Mode.PARALLEL not in modes:
        raise ConfigError("--timeline shows a request in mode parallel, which --modes leaves out")
    if args.temperature < 0:
        raise ConfigError("--temperature must be 0 or more")
    return SpeedOptions(
        num_prompts=args.prompts,
        task=Task.SYNTHETIC if synthetic else Task(args.task),
        modes=modes,
        max_tokens=args.max_tokens,
        sampling=SamplingParams(temperature=args.temperature, seed=args.seed),
        concurrency=args.concurrency,
        synthetic=synthetic,
    )


def _synthetic_options(args: argparse.Namespace) -> SyntheticOptions | None:
    if not args.random_weights:
        if args.shape is not None or args.alpha is not None:
            raise ConfigError("--shape and --alpha belong to --random-weights")
        return None
    acceptance = _RANDOM.acceptance if args.alpha is None else args.alpha
    if not 0 <= acceptance <= 1:
        raise ConfigError("--alpha is a probability, from 0 to 1")
    if args.temperature > 0:
        raise ConfigError("random models are compared greedily: leave out --temperature")
    if Mode.OFF.value not in args.modes:
        raise ConfigError("--random-weights needs mode off: what the target says alone is what the oracle proposes")
    return SyntheticOptions(shape=args.shape or _RANDOM.shape, acceptance=acceptance)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def _write(args: argparse.Namespace, report: SpeedReport, measured: Measurements) -> None:
    from vidspec_service.bench.plots import save_speedups, save_timeline

    if args.json is not None:
        report.write(args.json)
    if args.plot is not None:
        save_speedups(report, args.plot)
    if args.timeline is not None:
        lanes, window = measured.comparison.lanes(Mode.PARALLEL)
        save_timeline(lanes, window, report, args.timeline)
