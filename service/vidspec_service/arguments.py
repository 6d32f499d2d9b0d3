"""Command-line flags for argparse: numbers within bounds, files that can be read or written, and shared flags."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

DEFAULT_PORT = 8000  # where a server listens, and commands ask it
N = TypeVar("N", int, float)


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    return _number(int, text, lambda value: value >= 1, "1 or more")


def non_negative_int(text: str) -> int:
    """An integer of at least 0, for example a seed."""
    return _number(int, text, lambda value: value >= 0, "0 or more")


def positive_float(text: str) -> float:
    """A number above 0."""
    return _number(float, text, lambda value: 0 < value < math.inf, "above 0")


def non_negative_float(text: str) -> float:
    """A number of at least 0."""
    return _number(float, text, lambda value: 0 <= value < math.inf, "0 or more")


def _number(kind: Callable[[str], N], text: str, fits: Callable[[N], bool], bounds: str) -> N:
    try:
        value = kind(text)
    except ValueError:  # argparse would name the function
        raise argparse.ArgumentTypeError(f"must be {'an integer' if kind is int else 'a number'}, not {text}") from None
    if not fits(value):
        raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
    return value


def existing_file(text: str) -> Path:
    """A file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a file")
    return path


# Output paths are checked when arguments are parsed, so that a run of minutes does not fail when it writes its results.


def writable_file(text: str) -> Path:
    """A file that can be written."""
    path = Path(text)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {path}: {folder} is not a folder")
    if not os.access(folder, os.X_OK) or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}: permission denied")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {path}: it is a folder")
    return path


def plot_file(text: str) -> Path:
    """A file that can be written, of a format that matplotlib can draw."""
    path = writable_file(text)
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("plots need matplotlib: pip install 'vidspec[bench]'")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise argparse.ArgumentTypeError(f"cannot draw {path}: the file's name must end in one of {', '.join(kinds)}")
    return path


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """How a command asks a server."""
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with one of the server's keys [VIDSPEC_API_KEY_FILE; or the key itself in VIDSPEC_API_KEYS]",
    )
    parser.add_argument(
        "--timeout-s",
        type=positive_float,
        default=300.0,
        metavar="S",
        help="longest silence of the server (default 300)",
    )
