"""Options of a benchmark: each dataclass field declares its default, its command-line flag and the flag's values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from vidspec_models.request import SamplingParams
from vidspec_service.arguments import non_negative_float, non_negative_int, positive_float, positive_int

T = TypeVar("T")


def option(default: T, /, flag: str, about: str, **of_argument: Any) -> T:
    """A dataclass field that is also a command-line flag. `of_argument` goes to argparse's `add_argument`."""
    return field(default=default, metadata={"flag": flag, "help": about, **of_argument})


def number(default: T, /, flag: str, about: str, metavar: str = "N", **of_argument: Any) -> T:
    """A field whose flag takes an integer of at least 1, or any number above 0 if the default is a float.

    `of_argument` as for `option`, such as another `type`.
    """
    kind = positive_float if isinstance(default, float) else positive_int
    shown = "" if default is None else f" (default {default:g})"
    return option(default, flag, about + shown, **{"type": kind, "metavar": metavar, **of_argument})


def choices(kinds: Iterable[T], flag: str, about: str) -> tuple[T, ...]:
    """A field whose flag takes some of `kinds` (default: all). The result keeps this order, without duplicates."""
    every = tuple(kinds)
    return option(every, flag, about, nargs="+", choices=[str(kind) for kind in every], kinds=every)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add the flags of a dataclass to `parser`; each argument is stored under the name of its field."""
    for each in fields(options):
        declared = {key: value for key, value in each.metadata.items() if key not in ("flag", "kinds")}
        if each.metadata:
            parser.add_argument(each.metadata["flag"], dest=each.name, **{"default": each.default, **declared})


def options_from_args(options: Callable[..., T], args: argparse.Namespace, **others: Any) -> T:
    """Build the dataclass from its parsed flags and from `others`; lists become tuples without duplicates.

    A flag that is None leaves the field's default.
    """
    given = {}
    for each in fields(options):  # type: ignore[arg-type]
        if each.metadata and (value := getattr(args, each.name)) is not None:
            if isinstance(value, list):
                value = tuple(kind for kind in each.metadata.get("kinds", dict.fromkeys(value)) if kind in value)
            if isinstance(each.default, Enum):
                value = type(each.default)(value)
            given[each.name] = value
    return options(**{**given, **others})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How answers about test clips are sampled; each clip has a seed of its own."""

    temperature: float = option(0.0, "--temperature", "0, the default, is greedy", type=non_negative_float, metavar="T")
    seed: int = number(0, "--seed", "seed of sampling; clip i uses N + i", type=non_negative_int)

    def sampling(self, clip: int = 0) -> SamplingParams:
        """Sampling parameters for the clip of this number."""
        return SamplingParams(temperature=self.temperature, seed=self.seed + clip)

    @property
    def sampling_text(self) -> str:
        """The sampling as a report describes it."""
        return f"temperature {self.temperature:g}, seed {self.seed}" if self.temperature else "greedy"
