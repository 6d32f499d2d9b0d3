"""What a trace says of a generation: its steps, and the facts by the names that vLLM's traces have."""

from __future__ import annotations

import time
from typing import Any

from vidspec_models.request import GenerationRequest
from vidspec_service.engine.types import Accepted, Activity, GenerationEvent, Phase, TextDelta
from vidspec_service.telemetry import RequestTrace

_STEPS = {Phase.PREPARE: "prefill", Phase.PREFILL: "prefill", Phase.PROPOSE: "propose", Phase.VERIFY: "verify"}


class TracedGeneration:
    """Told of what happens, in its order."""

    def __init__(self, trace: RequestTrace, began: float) -> None:
        """`began` is when the request's body was here, on the monotonic clock."""
        self._trace = trace
        self._began = self._submitted = began
        self._first = self._last = 0.0  # when tokens came
        trace.step("admit", trace.began, began)

    def decoded(self, queue_s: float, decode_s: float, num_frames: int) -> None:
        """It waited for so long, then its videos were decoded; now it is submitted."""
        from_queue = self._began + queue_s
        self._submitted = from_queue + decode_s
        self._trace.step("admit", self._began, from_queue)
        self._trace.step("decode", from_queue, self._submitted, num_frames=num_frames)

    def accepted(self, event: Accepted) -> None:
        """The target has taken it up."""
        self._trace.step("submit", self._submitted, self._submitted + event.queue_s)

    def add(self, event: GenerationEvent) -> None:
        """The engine has said this."""
        if isinstance(event, Activity):
            step = _STEPS[event.phase]
            self._trace.step(step, event.start, event.end, worker=event.worker, num_tokens=event.num_tokens)
        elif isinstance(event, TextDelta) and event.num_tokens:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._trace.step("commit", self._last, self._last, worker="target", num_tokens=event.num_tokens)

    def close(self, request: GenerationRequest, model: str, outcome: str, facts: dict[str, Any]) -> None:
        """It has ended; `facts` are those of a complete answer."""
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
