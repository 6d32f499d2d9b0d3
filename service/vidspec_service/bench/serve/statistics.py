"""From outcomes to figures: percentiles, goodput, what was refused and what was lost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vidspec_service.bench.serve.exchange import Outcome

_REFUSALS = (429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of times in seconds."""

    p50: float
    p90: float
    p95: float
    p99: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None for no values."""
        if not values:
            return None
        p50, p90, p95, p99, worst = (float(value) for value in np.percentile(values, (50, 90, 95, 99, 100)))
        return cls(p50=p50, p90=p90, p95=p95, p99=p99, worst=worst)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """One load. Latencies are those of whole answers; goodput counts whole answers within both objectives."""

    name: str
    num_requests: int
    duration_s: float
    offered_per_s: float
    answered_per_s: float
    goodput_per_s: float
    tokens_per_s: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    num_answered: int
    num_left_early: int
    num_refused: int  # 429 and 503
    num_lost: int  # neither a whole answer, nor a refusal, nor a client that left
    num_late: int  # whole answers after the deadline
    refusal: Percentiles | None  # from due to refused
    errors: Mapping[str, int]  # "503 queue_full" to how often


def load_result(
    name: str,
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    slo_ttft_s: float,
    slo_tpot_s: float,
    deadline_s: float,
) -> LoadResult:
    """Figures of one load."""
    whole = [outcome for outcome in outcomes if outcome.is_complete]
    left = [outcome for outcome in outcomes if outcome.left_early]
    refused = [outcome for outcome in outcomes if outcome.status in _REFUSALS]
    good = [
        outcome
        for outcome in whole
        if (outcome.ttft_s or 0.0) <= slo_ttft_s and (outcome.tpot_s is None or outcome.tpot_s <= slo_tpot_s)
    ]
    wrong = [outcome for outcome in outcomes if not outcome.is_complete and not outcome.left_early]
    sent_s = max((outcome.due_s for outcome in outcomes), default=0.0)
    return LoadResult(
        name=name,
        num_requests=len(outcomes),
        duration_s=duration_s,
        offered_per_s=len(outcomes) / sent_s if sent_s > 0 else 0.0,
        answered_per_s=len(whole) / duration_s,
        goodput_per_s=len(good) / duration_s,
        tokens_per_s=sum(outcome.num_tokens for outcome in whole) / duration_s,
        ttft=Percentiles.of([outcome.ttft_s for outcome in whole if outcome.ttft_s is not None]),
        tpot=Percentiles.of([outcome.tpot_s for outcome in whole if outcome.tpot_s is not None]),
        e2e=Percentiles.of([outcome.e2e_s for outcome in whole]),
        num_answered=len(whole),
        num_left_early=len(left),
        num_refused=len(refused),
        num_lost=len(outcomes) - len(whole) - len(left) - len(refused),
        num_late=sum(outcome.e2e_s > deadline_s for outcome in whole),
        refusal=Percentiles.of([outcome.e2e_s for outcome in refused]),
        errors=dict(Counter(f"{outcome.status} {outcome.code}" for outcome in wrong).most_common()),
    )
