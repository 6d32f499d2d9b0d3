"""Time vidspec's decoding, OpenCV, torchcodec and decord, as far as they are installed, on the same frames.

Each library is measured in a process of its own, with its own defaults; the report says how its frames differ.
"""

from __future__ import annotations

import argparse

from vidspec_service.bench.common.options import add_options, options_from_args
from vidspec_service.bench.decode.run import DecodeOptions, measure_decoding
from vidspec_service.cli.bench_flags import add_output_flags, run_bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which clips, how often, what to write."""
    add_options(parser, DecodeOptions)
    add_output_flags(parser, "draw the times")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    options = options_from_args(DecodeOptions, args)
    return run_bench(args, lambda on_progress: measure_decoding(options, on_progress))
