"""Compare the ways to choose which video tokens the draft sees: acceptance on the target's own text, time, tokens/s.

Acceptance is exact and needs no engine: the draft follows the target's greedy text in one forward. Tokens per second
are predicted from it by the speed model, or measured with --engine (captions).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vidspec_service.bench.pruning.options import PruningOptions, Task
from vidspec_service.cli.bench_output import command_line, deliver, progress, require_outputs
from vidspec_service.cli.settings_flags import add_settings_flags, settings_of
from vidspec_service.engine.types import Preservation, SpeculationMode
from vidspec_service.errors import ConfigError

_DEFAULTS = PruningOptions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, what to write, and the settings of the engine."""
    parser.add_argument("--clips", type=int, default=_DEFAULTS.num_clips, metavar="N", help="default %(default)s")
    strategies = [strategy.value for strategy in Preservation]
    parser.add_argument("--strategies", nargs="+", choices=strategies, default=strategies, help="default all")
    parser.add_argument(
        "--ratios", nargs="+", type=float, default=list(_DEFAULTS.ratios), metavar="R", help="default %(default)s"
    )
    tasks = [task.value for task in Task]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks, help="default all")
    parser.add_argument(
        "--max-tokens", type=int, default=_DEFAULTS.max_tokens, metavar="N", help="per answer (default %(default)s)"
    )
    parser.add_argument(
        "--long-frames",
        type=int,
        default=_DEFAULTS.long_frames,
        metavar="N",
        help="frames of the clip that is timed (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the strategy random (default 0)")
    parser.add_argument("--engine", action="store_true", help="measure tokens/s of captions in the engine")
    parser.add_argument(
        "--follow", type=int, metavar="N", help="also try: hippo choosing anew every N tokens of a caption"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here, too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw acceptance over ratio")
    parser.add_argument("--overlay", type=Path, metavar="DIR", help="draw what each strategy keeps of the first clip")
    add_settings_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from vidspec_service.settings import engine_config
    from vidspec_service.telemetry import configure_logging

    options = pruning_options(args)
    require_outputs(args, args.overlay)
    settings = settings_of(args).model_copy(update={"speculation": SpeculationMode.AUTO})
    configure_logging("warning", settings.log_format)
    from vidspec_service.bench.pruning.plot import save_plot
    from vidspec_service.bench.pruning.run import Outputs, measure_pruning
    from vidspec_service.bench.pruning.tables import renderables

    outputs = Outputs(command=command_line(), overlay=args.overlay)
    with progress() as tell:
        report = measure_pruning(options, engine_config(settings), outputs, tell)
    deliver(args, report, renderables, save_plot)
    return 0


def pruning_options(args: argparse.Namespace) -> PruningOptions:
    """The options that the flags make; raises ConfigError for numbers that make no sense."""
    for name in ("clips", "max_tokens", "long_frames", "follow"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    for ratio in args.ratios:
        if not 0 <= ratio <= 0.99:
            raise ConfigError(f"--ratios must be from 0 to 0.99, not {ratio:g}")
    if args.follow is not None and Task.CAPTION not in args.tasks:
        raise ConfigError("--follow is about captions, which --tasks leaves out")
    return PruningOptions(
        num_clips=args.clips,
        strategies=tuple(strategy for strategy in Preservation if strategy in args.strategies),
        ratios=tuple(sorted(set(args.ratios))),
        tasks=tuple(task for task in Task if task in args.tasks),
        max_tokens=args.max_tokens,
        long_frames=args.long_frames,
        follow_every=args.follow,
        use_engine=args.engine,
        seed=args.seed,
    )
