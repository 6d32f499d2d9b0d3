"""Compare the modes of decoding and stock transformers on the same prompts in the same run.

Every prompt goes through all modes before the next one does; speed-ups are relative to `off`, the target alone on all
cores. Exit code 1: the modes did not give the same token ids.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from vidspec_models.synthetic.recipe import SHAPES
from vidspec_service.arguments import new_picture
from vidspec_service.bench.common.options import options_from_args
from vidspec_service.bench.speed.options import Mode, SpeedOptions, SpeedTask
from vidspec_service.bench.speed.report import speed_report
from vidspec_service.bench.speed.run import measure_speed
from vidspec_service.cli.bench_flags import add_bench_flags, pair_of, run_bench
from vidspec_service.engine.config import EngineConfig
from vidspec_service.errors import ConfigError
from vidspec_service.settings.derived import BUNDLED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, what to write, and the settings of the engine."""
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="measure without a checkpoint: random models of real shapes, with the acceptance that --alpha sets",
    )
    about = "draw when each worker worked on one request"
    parser.add_argument("--timeline", type=new_picture, metavar="FILE.png", help=about)
    add_bench_flags(parser, SpeedOptions, "draw the speed-ups")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    options = speed_options(args)
    pair = _named(options, pair_of(args))
    return run_bench(args, lambda on_progress: speed_report(options, pair, measure_speed(options, pair, on_progress)))


def _named(options: SpeedOptions, pair: EngineConfig) -> EngineConfig:
    """The pair with the names that the report gives its models."""
    if not options.is_synthetic:
        return pair
    if pair.target.model != BUNDLED or pair.draft is None or pair.draft.model != BUNDLED:
        raise ConfigError("--random-weights makes its own models: leave out --model, --draft-model and --speculation")
    shapes = SHAPES[options.shape]
    return replace(
        pair,
        target=replace(pair.target, model=f"random weights, shape of {shapes.target.source}"),
        draft=replace(pair.draft, model=f"random weights, shape of {shapes.draft.source}"),
    )


def speed_options(args: argparse.Namespace) -> SpeedOptions:
    """The options that the flags make; raises ConfigError for what cannot go together."""
    options = options_from_args(
        SpeedOptions, args, task=SpeedTask.SYNTHETIC if args.random_weights else SpeedTask(args.task)
    )
    if args.timeline is not None and Mode.PARALLEL not in options.modes:
        raise ConfigError("--timeline shows a request in mode parallel, but --modes does not include it")
    if not options.is_synthetic:
        if args.shape is not None or args.acceptance is not None:
            raise ConfigError("--shape and --alpha need --random-weights")
        return options
    if not 0 <= options.acceptance <= 1:
        raise ConfigError("--alpha must be a probability, from 0 to 1")
    if options.temperature > 0:
        raise ConfigError("random models are compared greedily: leave out --temperature")
    if Mode.OFF not in options.modes:
        raise ConfigError("--random-weights needs mode off: the oracle proposes what the target alone answers")
    return options
