"""RateLimit: a bucket of tokens for each caller, filled steadily. Pure, on an injected clock."""

from __future__ import annotations

from collections.abc import Callable


class RateLimit:
    """So many requests a minute for each caller, and as many at once after a quiet minute; None is no limit.

    Callers are names of API keys, so there are never more of them than the operator has handed out.
    """

    def __init__(self, per_minute: int | None, now: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens left, and when that was

    def take(self, caller: str) -> float:
        """0 if the caller may go on, which costs a token; else the seconds until there is one."""
        if self.per_minute is None:
            return 0.0
        now = self._now()
        tokens, then = self._buckets.get(caller, (float(self.per_minute), now))
        tokens = min(float(self.per_minute), tokens + (now - then) * self.per_minute / 60)
        if tokens < 1:
            self._buckets[caller] = (tokens, now)
            return (1 - tokens) * 60 / self.per_minute
        self._buckets[caller] = (tokens - 1, now)
        return 0.0
