"""Simulate a cluster of engines with the times that one takes here: routing, load, lost engines, their number.

One engine is started and measured; everything after that is simulated, event by event, and says nothing about networks.
"""

from __future__ import annotations

import argparse

from vidspec_service.bench.cluster.run import ClusterOptions, cluster_report
from vidspec_service.bench.cluster.simulation import Scenario
from vidspec_service.bench.common.options import options_of
from vidspec_service.cli.bench_flags import add_bench_flags, pair_of, run_bench
from vidspec_service.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to simulate, what to write, and the settings of an engine."""
    add_bench_flags(parser, ClusterOptions, "draw goodput and first tokens over load")


def run(args: argparse.Namespace) -> int:
    """Measure, simulate, print, write."""
    options, pair = cluster_options(args), pair_of(args)
    return run_bench(args, lambda tell: cluster_report(options, pair, tell))


def cluster_options(args: argparse.Namespace) -> ClusterOptions:
    """The options that the flags make; raises ConfigError for too few callers to make every load."""
    options = options_of(ClusterOptions, args)
    if options.num_callers <= (least := Scenario().max_running * options.num_engines):
        raise ConfigError(f"--callers must be more than {least}, the answers that the engines generate at once")
    return options
