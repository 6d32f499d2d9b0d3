"""Time vidspec's decoding, OpenCV, torchcodec and decord, as far as they are installed, on the same frames.

Each library is measured in a process of its own, with its own defaults; the report says how its frames differ.
"""

from __future__ import annotations

import argparse

from vidspec_service.bench.common.options import add_options, options_of
from vidspec_service.bench.decode.run import DecodeOptions, measure_decoding
from vidspec_service.cli.bench_flags import add_output_flags, run_bench
from vidspec_service.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which clips, how often, what to write."""
    add_options(parser, DecodeOptions)
    add_output_flags(parser, "draw the times")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    options = decode_options(args)
    return run_bench(args, lambda tell: measure_decoding(options, tell))


def decode_options(args: argparse.Namespace) -> DecodeOptions:
    """The options that the flags make; raises ConfigError for what cannot be measured."""
    options = options_of(DecodeOptions, args)
    if options.rendered_s == 0 and not options.clips:
        raise ConfigError("--seconds must be above 0, or 0 with --clip")
    return options
