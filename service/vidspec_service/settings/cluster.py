"""The settings of `vidspec serve-ray`: those of `vidspec serve`, of each frontend and engine, and how many they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from vidspec_service.settings.fields import NonEmpty, Seconds, Settings


@dataclass(frozen=True, slots=True)
class ReplicaRange:
    """How many replicas run: `min` always, up to `max` by load."""

    min: int
    max: int

    @classmethod
    def parse(cls, text: str) -> ReplicaRange:
        """Reads "2" or "1-8"; raises ValueError."""
        if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", text)):
            raise ValueError("expected a number such as 2, or a range such as 1-8")
        lowest, highest = int(match[1]), int(match[2] or match[1])
        if highest < max(lowest, 1):
            raise ValueError("expected at least 1, and in a range the smaller number first")
        return cls(lowest, highest)


def _check_range(text: str) -> str:
    ReplicaRange.parse(text)
    return text


def _check_range_from_one(text: str) -> str:
    if ReplicaRange.parse(text).min == 0:
        raise ValueError("expected at least 1: without a frontend, nothing listens")
    return text


def _check_steps(number: float) -> float:
    if round(number, 4) != number:
        raise ValueError("expected at most four decimal places, as Ray counts")
    return number


def _check_gpus(number: float) -> float:
    if number > 1 and number % 1:
        raise ValueError("expected a whole number, or a part of one GPU")
    return number


_AsText = BeforeValidator(str)
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_check_steps)]


class ClusterSettings(Settings):
    """Limits of requests and callers hold for each frontend by itself; those of running requests for each engine."""

    ray_address: NonEmpty | None = None
    """Ray cluster to join, auto or HOST:PORT; unset: one is started on this machine."""
    engines: Annotated[str, _AsText, AfterValidator(_check_range)] = "1"
    """Number of engines (model pairs): fixed, or a range such as 1-8, by load; from 0: none while idle."""
    frontends: Annotated[str, _AsText, AfterValidator(_check_range_from_one)] = "1"
    """Number of processes that listen, decode and stream: fixed, or a range such as 1-4, by load."""
    engine_idle_s: Seconds = 600
    """An engine that is no longer needed is stopped after this long, if `engines` is a range."""
    engine_drain_s: Seconds | None = None
    """Time for a stopping engine to finish its answers, before other engines continue them; unset: drain_timeout_s."""
    engine_cpus: _Amount = 2
    """CPUs that Ray reserves for an engine."""
    engine_gpus: Annotated[_Amount, AfterValidator(_check_gpus)] = 0
    """GPUs that Ray reserves for an engine, all on one node; cuda:0 is the first of them."""
    frontend_cpus: _Amount = 1
    """CPUs that Ray reserves for a frontend."""
