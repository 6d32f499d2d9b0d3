"""Write one of the clips that the bundled models were made for: 4 s, 16 frames per second, H.264, 256 x 256.

Prints its true caption. The same seed gives the same clip on every machine.
"""

from __future__ import annotations

import argparse

from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.questions import questions
from vidspec_service.arguments import non_negative_int, writable_file
from vidspec_service.bench.common.scenes import write_scene
from vidspec_service.cli.terminal import note, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which clip, and where to."""
    parser.add_argument("output", type=writable_file, metavar="OUT.mp4", help="the file to write")
    parser.add_argument("--seed", type=non_negative_int, required=True, metavar="N", help="which clip, 0 or more")
    parser.add_argument("--questions", action="store_true", help="also print questions with their true answers")


def run(args: argparse.Namespace) -> int:
    """Render, write, tell the truth about it."""
    try:
        scene = write_scene(args.seed, args.output)
    except (OSError, ValueError) as error:  # a full disk, a suffix that names no container for such a video
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "" if args.output.suffix == ".mp4" else "; let its name end in .mp4"
        note(f"vidspec render-clip: cannot write {args.output}: {reason}{remedy}")
        return 2
    say(caption(scene))
    if args.questions:
        for question in questions(scene):
            say(f"{question.kind:<14} {question.text}  {question.answer}")
    return 0
