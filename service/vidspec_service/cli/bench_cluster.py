"""Simulate a cluster of engines, from times of one engine on this machine: routing, load, lost engines, scaling.

One engine is started and measured. Everything else is a discrete-event simulation, which leaves networks out.
"""

from __future__ import annotations

import argparse
from functools import partial

from vidspec_service.bench.cluster.run import ClusterOptions, measure_cluster
from vidspec_service.bench.common.options import options_from_args
from vidspec_service.cli.bench_flags import add_bench_flags, pair_of, run_bench

add_arguments = partial(
    add_bench_flags, options=ClusterOptions, plot="draw goodput and time to the first token over load"
)


def run(args: argparse.Namespace) -> int:
    """Measure, simulate, print, write."""
    options, pair = options_from_args(ClusterOptions, args), pair_of(args)
    return run_bench(args, lambda on_progress: measure_cluster(options, pair, on_progress))
