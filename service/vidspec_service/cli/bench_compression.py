"""Measure compression on the target: what fewer video tokens cost in accuracy and save in time and memory.

The target answers alone and greedily about rendered test clips whose content is known. Each configuration runs in a
process of its own. DyCoke's L and P come from --dycoke-layer and --dycoke-hide-ratio; its K is chosen to keep the share
in --ratios, but always at least a quarter of the tokens.
"""

from __future__ import annotations

import argparse
from functools import partial

from vidspec_models.request import Compression
from vidspec_service.bench.common.environment import spec_of
from vidspec_service.bench.common.options import options_from_args
from vidspec_service.bench.common.report import OnProgress, Report
from vidspec_service.bench.compression.options import CompressionOptions
from vidspec_service.bench.compression.report import compression_report
from vidspec_service.bench.compression.run import measure_compression
from vidspec_service.cli.bench_flags import add_bench_flags, run_bench
from vidspec_service.cli.settings_flags import settings_of
from vidspec_service.engine.frontend.workers import num_cores
from vidspec_service.errors import ConfigError
from vidspec_service.settings import Settings, engine_config

add_arguments = partial(add_bench_flags, options=CompressionOptions, plot="draw accuracy against time and memory")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    settings = settings_of(args)
    options = compression_options(args, settings)
    target, threads = engine_config(settings).target, settings.target_threads or num_cores()

    def measured(on_progress: OnProgress) -> Report:
        found, placement = measure_compression(options, spec_of(target, "target"), threads, on_progress)
        return compression_report(options, found, placement, settings.model, threads)

    return run_bench(args, measured)


def compression_options(args: argparse.Namespace, settings: Settings) -> CompressionOptions:
    """The options that flags and settings make; raises ConfigError if `compression` is set."""
    if settings.compression is not Compression.NONE:
        raise ConfigError("bench compression compares with and without compression: leave out --compression")
    return options_from_args(CompressionOptions, args, dycoke=engine_config(settings).dycoke)
