"""When things happened to one request, from the last byte of its body on; tells the metrics as it goes."""

from __future__ import annotations

import time

from vidspec_service.engine.types import Finished
from vidspec_service.telemetry import Metrics


class Stopwatch:
    """Starts when it is built. The numbers are those of `timings` in the answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.monotonic()
        self._first: float | None = None
        self._last = self._began
        self._num_tokens = 0
        self.turn_s = 0.0
        self.decode_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Until now."""
        return time.monotonic() - self._began

    @property
    def time_to_first_token_s(self) -> float:
        """0 as long as there is none."""
        return 0.0 if self._first is None else self._first - self._began

    @property
    def time_per_output_token_s(self) -> float:
        """Mean over the tokens after the first; 0 if there are none."""
        return self._answering_s / (self._num_tokens - 1) if self._num_tokens > 1 else 0.0

    def turn_came(self) -> None:
        """The request has waited for its turn; waiting is the first thing that happens."""
        self.turn_s = self.elapsed_s

    def decoded(self) -> None:
        """The frames are there, out of the file or out of memory."""
        self.decode_s = self.elapsed_s - self.turn_s

    def tokens(self, count: int) -> None:
        """`count` tokens arrived together."""
        if count == 0:
            return
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._metrics.first_token(now - self._began)
        else:
            self._metrics.token_gap(now - self._last)
        self._last = now
        self._num_tokens += count
        self._metrics.tokens(count)

    def finished(self, event: Finished) -> None:
        """The answer is complete."""
        self._metrics.request_phases(
            queue_s=self.turn_s + event.queue_s,
            prefill_s=event.prefill_s,
            decode_s=self._answering_s,
            per_token_s=self.time_per_output_token_s if self._num_tokens > 1 else None,
            num_tokens=event.completion_tokens,
        )

    @property
    def _answering_s(self) -> float:
        return 0.0 if self._first is None else self._last - self._first
