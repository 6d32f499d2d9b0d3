"""Compare the ways to choose which video tokens the draft sees: acceptance on the target's own text, time, tokens/s.

Acceptance is exact and needs no engine: the draft follows the target's greedy text in one forward. Tokens per second
are predicted from it by the speed model, or measured with --engine (captions).
"""

from __future__ import annotations

import argparse

from vidspec_service.bench.common.options import options_of
from vidspec_service.bench.pruning.options import PruningOptions, Task
from vidspec_service.cli.bench_flags import add_bench_flags, pair_of, run_bench
from vidspec_service.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, what to write, and the settings of the engine."""
    add_bench_flags(parser, PruningOptions, "draw acceptance over ratio")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    options, pair = pruning_options(args), pair_of(args)
    from vidspec_service.bench.pruning.run import measure_pruning  # torch: not before flags are known to be right

    return run_bench(args, lambda tell: measure_pruning(options, pair, tell))


def pruning_options(args: argparse.Namespace) -> PruningOptions:
    """The options that the flags make; raises ConfigError for numbers that make no sense."""
    options = options_of(PruningOptions, args, ratios=tuple(sorted(set(args.ratios))))
    for ratio in options.ratios:
        if not 0 <= ratio <= 0.99:
            raise ConfigError(f"--ratios must be from 0 to 0.99, not {ratio:g}")
    if options.use_engine and Task.CAPTION not in options.tasks:
        raise ConfigError("--engine measures captions, but --tasks does not include them")
    return options
