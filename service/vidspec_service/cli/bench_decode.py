"""Time our decoding next to OpenCV, torchcodec and decord, where they are installed, on the same frames.

Each library is measured in a process of its own, with its own defaults; how its frames differ from ours is shown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vidspec_service.bench.decode.run import DecodeOptions, measure_decoding
from vidspec_service.cli.bench_flags import add_number, add_output_flags, require_files, require_outputs, run_bench
from vidspec_service.errors import ConfigError

_DEFAULTS = DecodeOptions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which clips, how often, what to write."""
    parser.add_argument("--clip", type=Path, nargs="+", default=[], metavar="FILE", help="these, too")
    parser.add_argument(
        "--seconds",
        type=float,
        default=_DEFAULTS.rendered_s,
        metavar="S",
        help="length of the 720p clip that is rendered; 0 for none (default %(default)g)",
    )
    add_number(parser, "--frames", _DEFAULTS.num_frames, "per clip")
    add_number(parser, "--repeats", _DEFAULTS.repeats, "timed reads")
    add_output_flags(parser, "draw the times")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    options = decode_options(args)
    require_outputs(args)
    run_bench(args, lambda command, tell: measure_decoding(options, command, tell))
    return 0


def decode_options(args: argparse.Namespace) -> DecodeOptions:
    """The options that the flags make; raises ConfigError for what cannot be measured."""
    require_files(args.clip)
    if args.seconds < 0 or (args.seconds == 0 and not args.clip):
        raise ConfigError("--seconds must be above 0, or 0 with --clip")
    return DecodeOptions(clips=tuple(args.clip), rendered_s=args.seconds, num_frames=args.frames, repeats=args.repeats)
