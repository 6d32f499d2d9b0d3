"""Observes a generation while it runs: times for the metrics and what `include` asks for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vidspec_models.request import Include
from vidspec_service.api.schemas.tellings import view_of
from vidspec_service.engine.types import Activity, DraftView, ExtraEvent, Finished
from vidspec_service.telemetry import Metrics

_MOST_SPANS = 10_000  # sent at once


class AnswerClock:
    """When the tokens of one answer came, and where its time went; recorded in the metrics as it goes."""

    def __init__(self, metrics: Metrics, began: float) -> None:
        """`began` is when the request's body had arrived."""
        self._metrics = metrics
        self._began = began
        self.first = self.last = began  # when its first and latest tokens came
        self.num_tokens = 0
        self.queue_s = 0.0  # before it was submitted; in all queues once it has ended
        self.finished: Finished | None = None  # once it has ended

    @property
    def per_token_s(self) -> float:
        """Mean seconds for each token after the first; 0 if there are none."""
        return (self.last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def count(self, count: int) -> None:
        """`count` tokens arrived together."""
        if count == 0:
            return
        now = time.monotonic()
        if self.num_tokens == 0:
            self.first = now
            self._metrics.time_to_first_token.observe(now - self._began)
        else:
            self._metrics.inter_token_latency.observe(now - self.last)
        self.last = now
        self.num_tokens += count
        self._metrics.generation_tokens.inc(count)

    def end(self, finished: Finished) -> None:
        """The answer is complete. With a single token it has no time per token."""
        self.finished = finished
        self.queue_s += finished.queue_s
        metrics = self._metrics
        metrics.request_queue_time.observe(self.queue_s)
        metrics.request_prefill_time.observe(finished.prefill_s)
        metrics.request_decode_time.observe(self.last - self.first)
        metrics.request_inference_time.observe(finished.prefill_s + (self.last - self.first))
        metrics.request_generation_tokens.observe(finished.completion_tokens)
        if self.num_tokens > 1:
            metrics.request_time_per_output_token.observe(self.per_token_s)


class Tellings:
    """What is known about how an answer is generated, and has not been sent yet."""

    def __init__(self, include: frozenset[Include], began: float) -> None:
        """`began` is time 0 of the request, on the monotonic clock."""
        self._include = include
        self._began = began
        self._view: DraftView | None = None
        self._work: list[Activity] = []

    def add(self, telling: ExtraEvent) -> None:
        """Take an event from the engine."""
        if isinstance(telling, DraftView):
            self._view = telling
        elif len(self._work) < _MOST_SPANS:
            self._work.append(telling)

    def take(self, timestamps_s: Sequence[Sequence[float]]) -> dict[str, Any]:
        """The fields of a `Told`: all that came since the last call. `timestamps_s`: of each video's frames."""
        told: dict[str, Any] = {}
        if self._view is not None:
            told["draft_view"] = view_of(self._view, timestamps_s)
        if Include.TIMELINE in self._include:
            told["timeline"] = [self._span(each) for each in self._work]
        self._view, self._work = None, []
        return told

    def _span(self, work: Activity) -> dict[str, Any]:
        return {
            "worker": work.worker,
            "phase": work.phase,
            "start_s": work.start - self._began,
            "end_s": work.end - self._began,
            "num_tokens": work.num_tokens,
        }
