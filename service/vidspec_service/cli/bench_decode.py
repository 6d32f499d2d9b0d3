"""Time our decoding next to OpenCV, torchcodec and decord, where they are installed, on the same frames.

Each library is measured in a process of its own, with its own defaults; how its frames differ from ours is shown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vidspec_service.bench.decode.options import DecodeOptions
from vidspec_service.cli.bench_output import command_line, deliver, progress, require_files, require_outputs
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
    parser.add_argument(
        "--frames", type=int, default=_DEFAULTS.num_frames, metavar="N", help="per clip (default %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=_DEFAULTS.repeats, metavar="N", help="timed reads (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here, too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from vidspec_service.bench.decode.measuring import measure_decoding
    from vidspec_service.bench.decode.output import renderables, save_plot

    options = decode_options(args)
    require_outputs(args)
    with progress() as tell:
        report = measure_decoding(options, command_line(), tell)
    deliver(args, report, renderables, save_plot)
    return 0


def decode_options(args: argparse.Namespace) -> DecodeOptions:
    """The options that the flags make; raises ConfigError for what cannot be measured."""
    for name in ("frames", "repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} must be 1 or more, not {getattr(args, name)}")
    require_files(args.clip)
    if args.seconds < 0 or (args.seconds == 0 and not args.clip):
        raise ConfigError("--seconds must be above 0, or 0 with --clip")
    return DecodeOptions(clips=tuple(args.clip), rendered_s=args.seconds, num_frames=args.frames, repeats=args.repeats)
