"""Compare the ways to choose which video tokens the draft sees: acceptance on the target's own text, time, tokens/s.

Acceptance is exact and needs no engine: the draft follows the target's greedy text in one forward. Tokens per second
are predicted from it by the speed model, or measured with --engine (captions).
"""

from __future__ import annotations

import argparse
from functools import partial

from vidspec_service.bench.common.options import options_from_args
from vidspec_service.bench.pruning.options import PruningOptions
from vidspec_service.cli.bench_flags import add_bench_flags, pair_of, run_bench

add_arguments = partial(add_bench_flags, options=PruningOptions, plot="draw acceptance over ratio")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    options, pair = options_from_args(PruningOptions, args), pair_of(args)
    from vidspec_service.bench.pruning.run import measure_pruning  # torch: not before flags are known to be right

    return run_bench(args, lambda on_progress: measure_pruning(options, pair, on_progress))
