"""What a run of `bench serve` is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """One load: `rate` makes it open, else `concurrency` closed; `overload` and `soak` are runs of their own."""

    num_requests: int = 64
    concurrency: int = 8
    rate: float | None = None  # arrivals per second, Poisson
    overload: float | None = None  # arrivals as a multiple of the measured capacity
    duration_s: float = 120.0  # of the overload
    soak: int | None = None  # requests, of which some leave early
    warm_up: int | None = None  # requests before the soak; None: a fifth as many
    clips: tuple[Path, ...] = ()  # none: rendered ones
    num_clips: int = 8  # that are rendered
    has_repeated_files: bool = False  # else every request's file differs in a byte: no cache can help
    max_tokens: int = 64
    num_frames: int | None = None
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.1
    deadline_s: float = 120.0  # the server's own, request_timeout_s
    seed: int = 0
