"""The times of an answer while it is generated, for the metrics and for `timings`."""

from __future__ import annotations

import time

from vidspec_service.engine.types import Finished
from vidspec_service.telemetry import Metrics


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
