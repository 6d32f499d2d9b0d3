"""From what was seen to what is said: a ModeResult for every mode. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vidspec_service.bench.activity import Activity, forward_facts, idle_ratio
from vidspec_service.bench.bootstrap import speedup_interval
from vidspec_service.bench.comparison import Comparison
from vidspec_service.bench.costs import Prediction, ProbedCosts, predict
from vidspec_service.bench.options import BASELINE, Mode
from vidspec_service.bench.report import ModeResult, WorkerUse
from vidspec_service.bench.samples import (
    Sample,
    Work,
    acceptance_rate,
    decoding_by_group,
    decoding_windows,
    first_token_s,
    mean_accepted_tokens,
    throughput,
    total,
)


class Aggregation:
    """All modes of one comparison; a prediction is made for one request at a time only."""

    def __init__(self, comparison: Comparison, costs: ProbedCosts, latency_s: float, concurrency: int) -> None:
        self._comparison = comparison
        self._costs = costs
        self._latency_s = latency_s
        self._concurrency = concurrency
        self._baseline = self._samples(BASELINE)

    def result(self, mode: Mode) -> ModeResult:
        """Everything about one mode."""
        samples = self._samples(mode)
        works, base_works = decoding_by_group(samples), decoding_by_group(self._baseline)
        work, whole = total(works.values()), throughput(samples)
        speedup = _ratio(work, total(base_works.values()))
        prediction = self._prediction(mode, samples)
        return ModeResult(
            tokens_per_s=work.rate,
            speedup_vs_off=speedup,
            speedup_interval=speedup_interval(works, base_works),
            throughput_tokens_per_s=whole.rate,
            throughput_vs_off=_ratio(whole, throughput(self._baseline)),
            ttft_s=first_token_s(samples),
            num_tokens=sum(len(sample.ids) for sample in samples),
            acceptance_rate=acceptance_rate(samples) if mode.needs_draft else None,
            mean_accepted_tokens=mean_accepted_tokens(samples) if mode.needs_draft else None,
            predicted_speedup=prediction.speedup if prediction else None,
            predicted_minimum=prediction.plan.minimum if prediction else None,
            predicted_window=prediction.plan.window if prediction else None,
            fraction_of_prediction=speedup / prediction.speedup if prediction and speedup is not None else None,
            workers=self._workers(mode, samples),
        )

    def _samples(self, mode: Mode) -> list[Sample]:
        return [sample for sample in self._comparison.samples if sample.mode is mode]

    def _prediction(self, mode: Mode, samples: Sequence[Sample]) -> Prediction | None:
        if self._concurrency > 1:
            return None
        return predict(mode, acceptance_rate(samples), self._costs, self._latency_s)

    def _workers(self, mode: Mode, samples: Sequence[Sample]) -> dict[str, WorkerUse]:
        activity = self._comparison.activities.get(mode)
        if activity is None:
            return {}
        roles = ("target", "draft") if mode.needs_draft else ("target",)
        return {role: _worker_use(activity, role, samples) for role in roles}


def _worker_use(activity: Activity, role: str, samples: Sequence[Sample]) -> WorkerUse:
    windows, spans = decoding_windows(samples), activity.spans(role)
    return WorkerUse(idle_ratio=idle_ratio(spans, windows), forwards=forward_facts(spans, windows))


def _ratio(ours: Work, base: Work) -> float | None:
    return ours.rate / base.rate if base.rate > 0 else None
