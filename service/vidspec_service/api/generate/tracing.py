"""What a request's trace says of its answers, with vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vidspec_models.request import GenerationRequest
from vidspec_service.api.generate.stats import AnswerStats
from vidspec_service.telemetry import RequestTrace


def record_answers(
    trace: RequestTrace,
    request: GenerationRequest,
    head: Mapping[str, Any],
    answers: Sequence[AnswerStats],
    outcome: str,
    facts: Mapping[str, Any],
) -> None:
    """Record a generation that has ended; `facts` are empty unless its answers are complete."""
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
