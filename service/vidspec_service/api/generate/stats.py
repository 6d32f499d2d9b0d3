"""What is recorded of the answers of a request: their times, for the metrics and `timings`, and its trace."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vidspec_models.request import GenerationRequest
from vidspec_service.engine.types import Finished
from vidspec_service.telemetry import Metrics, RequestTrace


class AnswerStats:
    """When the tokens of one answer were committed, and where its time went; also records both in the metrics."""

    def __init__(self, metrics: Metrics, began: float) -> None:
        """`began` is when the request's body had arrived."""
        self._metrics = metrics
        self.began = began
        self.first_token_at = self.last_token_at = began
        self.num_tokens = 0
        self.queue_s = 0.0  # before it was submitted; in all queues once it has ended
        self.finished: Finished | None = None  # once it has ended

    @property
    def per_token_s(self) -> float:
        """Mean seconds for each token after the first; 0 if there are none."""
        return (self.last_token_at - self.first_token_at) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def add_tokens(self, num: int) -> None:
        """`num` tokens were committed together."""
        if num == 0:
            return
        now = time.monotonic()
        if self.num_tokens == 0:
            self.first_token_at = now
            self._metrics.time_to_first_token.observe(now - self.began)
        else:
            self._metrics.inter_token_latency.observe(now - self.last_token_at)
        self.last_token_at = now
        self.num_tokens += num
        self._metrics.generation_tokens.inc(num)

    def finish(self, finished: Finished) -> None:
        """The answer is complete. With a single token it has no time per token."""
        self.finished = finished
        self.queue_s += finished.queue_s
        metrics = self._metrics
        metrics.request_queue_time.observe(self.queue_s)
        metrics.request_prefill_time.observe(finished.prefill_s)
        metrics.request_decode_time.observe(self.last_token_at - self.first_token_at)
        metrics.request_inference_time.observe(finished.prefill_s + (self.last_token_at - self.first_token_at))
        metrics.request_generation_tokens.observe(finished.completion_tokens)
        if self.num_tokens > 1:
            metrics.request_time_per_output_token.observe(self.per_token_s)


def trace_answers(
    trace: RequestTrace,
    request: GenerationRequest,
    head: Mapping[str, Any],
    answers: Sequence[AnswerStats],
    outcome: str,
    facts: Mapping[str, Any],
) -> None:
    """Add what has ended to its request's trace, in vLLM's words; `facts` are empty unless all answers are complete."""
    now = time.monotonic()
    trace.add_step("admit", trace.began, answers[0].began)
    begun = [answer for answer in answers if answer.num_tokens]
    first = min((answer.first_token_at for answer in begun), default=now)
    last = max((answer.last_token_at for answer in begun), default=now)
    if begun:
        num_tokens = sum(answer.num_tokens for answer in begun)
        trace.add_step("commit", first, first, worker="target", num_tokens=num_tokens)
        trace.add_step("commit", last, last, worker="target")
        trace.add_step("stream", first, now)
    usage, timings = facts.get("usage", {}), facts.get("timings", {})
    trace.set_attributes(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.id": str(head["id"]),
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.n": request.n,
            "gen_ai.response.model": str(head["model"]),
            "gen_ai.usage.prompt_tokens": usage.get("prompt_tokens"),
            "gen_ai.usage.completion_tokens": usage.get("completion_tokens"),
            "gen_ai.latency.time_in_queue": timings.get("queue_s"),
            "gen_ai.latency.time_to_first_token": timings.get("time_to_first_token_s"),
            "gen_ai.latency.time_in_model_prefill": timings.get("prefill_s"),
            "gen_ai.latency.time_in_model_decode": last - first,
            "gen_ai.latency.e2e": now - trace.began,
            "vidspec.speculation": str(request.speculation),
            "vidspec.compression": str(request.compression),
            "vidspec.outcome": outcome,
        }
    )
