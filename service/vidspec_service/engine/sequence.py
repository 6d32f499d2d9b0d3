"""TargetSequence: one request's committed tokens on the target, and when they are complete. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vidspec_service.engine.types import FinishReason


class TargetSequence:
    """Only the target appends to `committed`; everything a client may see is in it."""

    def __init__(self, stop_ids: frozenset[int], max_tokens: int) -> None:
        if max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self.committed: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def num_left(self) -> int:
        """Tokens that may still be committed."""
        return self._max_tokens - len(self.committed)

    def commit(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Append the target's own tokens up to an end-of-sequence id or the limit; returns what was appended."""
        if self.finish_reason is not None:
            raise ValueError("the sequence has ended")
        before = len(self.committed)
        for token in tokens:
            self.committed.append(token)
            if token in self._stop_ids:
                self.finish_reason = FinishReason.STOP
            elif len(self.committed) == self._max_tokens:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                break
        return tuple(self.committed[before:])
