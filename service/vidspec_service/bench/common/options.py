"""Options of a bench: a field is declared once, with its default, its flag and what the flag takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def option(default: T, flag: str, about: str, **of_argument: Any) -> T:
    """A field of a dataclass of options that is a flag, too. `of_argument`: what argparse shall know besides."""
    return field(default=default, metadata={"flag": flag, "help": about, **of_argument})


def number(default: T, flag: str, about: str, metavar: str = "N") -> T:
    """A field with a flag for a whole number from 1 on, or for any number above 0 where the default is one."""
    kind = positive if isinstance(default, float) else count
    shown = "" if default is None else f" (default {default:g})"
    return option(default, flag, about + shown, type=kind, metavar=metavar)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """The flags of a dataclass, each under the name of its field."""
    for each in fields(options):
        if declared := dict(each.metadata):
            parser.add_argument(declared.pop("flag"), dest=each.name, default=each.default, **declared)


def options_of(options: Callable[..., T], args: argparse.Namespace, **others: Any) -> T:
    """The dataclass as its flags make it, but for these other fields."""
    given = {each.name: getattr(args, each.name) for each in fields(options) if each.metadata}  # type: ignore[arg-type]
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return options(**{**given, **lists, **others})


def count(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, not {value:g}")
    return value


def existing_file(text: str) -> Path:
    """A file that is there to be read."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a file")
    return path
