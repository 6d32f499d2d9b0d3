"""Observes a generation while it runs: times for the metrics, what `include` asks for, steps for a trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vidspec_models.request import GenerationRequest, Include
from vidspec_service.api.schemas.tellings import view_of
from vidspec_service.engine.types import (
    Accepted,
    Activity,
    DraftView,
    Finished,
    GenerationEvent,
    Phase,
    Telling,
    TextDelta,
)
from vidspec_service.telemetry import Metrics, RequestTrace

_MOST_SPANS = 10_000  # sent at once
_STEPS = {Phase.PREPARE: "prefill", Phase.PREFILL: "prefill", Phase.PROPOSE: "propose", Phase.VERIFY: "verify"}


class AnswerClock:
    """When the tokens of one answer came, and where its time went; recorded in the metrics as it goes."""

    def __init__(self, metrics: Metrics, began: float) -> None:
        """`began` is when the request's body had arrived."""
        self._metrics = metrics
        self._began = began
        self.first = self._last = began  # when its first and latest tokens came
        self.num_tokens = 0
        self.finished: Finished | None = None  # once it has ended

    @property
    def per_token_s(self) -> float:
        """Mean seconds for each token after the first; 0 if there are none."""
        return (self._last - self.first) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def count(self, count: int) -> None:
        """`count` tokens arrived together."""
        if count == 0:
            return
        now = time.monotonic()
        if self.num_tokens == 0:
            self.first = now
            self._metrics.time_to_first_token.observe(now - self._began)
        else:
            self._metrics.inter_token_latency.observe(now - self._last)
        self._last = now
        self.num_tokens += count
        self._metrics.generation_tokens.inc(count)

    def end(self, finished: Finished, queue_s: float) -> None:
        """The answer is complete; it was in our queue for `queue_s`. With a single token it has no time per token."""
        self.finished = finished
        metrics = self._metrics
        metrics.request_queue_time.observe(queue_s + finished.queue_s)
        metrics.request_prefill_time.observe(finished.prefill_s)
        metrics.request_decode_time.observe(self._last - self.first)
        metrics.request_inference_time.observe(finished.prefill_s + (self._last - self.first))
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

    def add(self, telling: Telling) -> None:
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


class TracedGeneration:
    """Records a generation in a trace, with vLLM's names. Its methods are called in the order of the events."""

    def __init__(self, trace: RequestTrace, began: float) -> None:
        """`began` is when the request's body had arrived, on the monotonic clock."""
        self._trace = trace
        self._began = self._submitted = began
        self._first = self._last = 0.0  # when tokens came
        trace.step("admit", trace.began, began)

    def decoded(self, queue_s: float, decode_s: float, num_frames: int) -> None:
        """The request waited for `queue_s`, then its videos were decoded in `decode_s`; now it is submitted."""
        from_queue = self._began + queue_s
        self._submitted = from_queue + decode_s
        self._trace.step("admit", self._began, from_queue)
        self._trace.step("decode", from_queue, self._submitted, num_frames=num_frames)

    def accepted(self, event: Accepted) -> None:
        """The target has taken the request up."""
        self._trace.step("submit", self._submitted, self._submitted + event.queue_s)

    def add(self, event: GenerationEvent) -> None:
        """Take an event from the engine."""
        if isinstance(event, Activity):
            step = _STEPS[event.phase]
            self._trace.step(step, event.start, event.end, worker=event.worker, num_tokens=event.num_tokens)
        elif isinstance(event, TextDelta) and event.num_tokens:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._trace.step("commit", self._last, self._last, worker="target", num_tokens=event.num_tokens)

    def close(self, request: GenerationRequest, model: str, outcome: str, facts: dict[str, Any]) -> None:
        """The request has ended; `facts` are empty unless its answer is complete."""
        now = time.monotonic()
        if self._first:
            self._trace.step("stream", self._first, now)
        usage, timings = facts.get("usage", {}), facts.get("timings", {})
        self._trace.tell(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.request.id": request.request_id,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.request.top_p": request.sampling.top_p,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.n": request.n,
                "gen_ai.response.model": model,
                "gen_ai.usage.prompt_tokens": usage.get("prompt_tokens"),
                "gen_ai.usage.completion_tokens": usage.get("completion_tokens"),
                "gen_ai.latency.time_in_queue": timings.get("queue_s"),
                "gen_ai.latency.time_to_first_token": timings.get("time_to_first_token_s"),
                "gen_ai.latency.time_in_model_prefill": timings.get("prefill_s"),
                "gen_ai.latency.time_in_model_decode": self._last - self._first,
                "gen_ai.latency.e2e": now - self._trace.began,
                "vidspec.speculation": str(request.speculation),
                "vidspec.compression": str(request.compression),
                "vidspec.outcome": outcome,
            }
        )
        if outcome == "error":
            self._trace.fail("the engine gave no answer")
