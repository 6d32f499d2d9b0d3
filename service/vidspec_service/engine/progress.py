"""GenerationProgress: one request's clock and counters on the API side, from the target's messages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from vidspec_service.engine.messages import Accepted, Tokens
from vidspec_service.engine.types import Finished, FinishReason, SpeculationMode, SpeculationStats


@dataclass(slots=True)
class GenerationProgress:
    """Fed with every message of a request; knows what `Finished` has to say at any moment."""

    mode: SpeculationMode
    _queue_s: float = 0.0
    _prepare_s: float = 0.0
    _accepted_at: float = field(default_factory=time.monotonic)
    _draft_video_tokens: int = 0
    _prefill_s: float = 0.0
    _num_verifications: int = 0
    _num_drafts: int = 0
    _num_draft_tokens: int = 0
    _num_accepted_tokens: int = 0

    def accepted(self, message: Accepted) -> None:
        """The target has prepared the prompt."""
        self._queue_s, self._prepare_s = message.queue_s, message.prepare_s
        self._accepted_at = time.monotonic()

    def committed(self, message: Tokens) -> None:
        """A forward committed tokens; the first ends the prefill."""
        if not self._prefill_s:
            self._prefill_s = self._prepare_s + time.monotonic() - self._accepted_at
        else:
            self._num_verifications += 1
        self._num_drafts += message.num_proposed > 0
        self._draft_video_tokens = message.draft_video_tokens
        # Judged are the accepted ones and the first refused; what follows a refusal never had its chance.
        self._num_draft_tokens += message.num_accepted + (message.num_accepted < message.num_proposed)
        self._num_accepted_tokens += message.num_accepted

    def finished(self, reason: FinishReason, completion_tokens: int) -> Finished:
        """The closing event."""
        return Finished(
            finish_reason=reason,
            completion_tokens=completion_tokens,
            speculation=SpeculationStats(
                mode=self._mode_used(),
                num_drafts=self._num_drafts,
                num_draft_tokens=self._num_draft_tokens,
                num_accepted_tokens=self._num_accepted_tokens,
                num_verifications=self._num_verifications,
                draft_video_tokens=self._draft_video_tokens if self._num_drafts else 0,
            ),
            queue_s=self._queue_s,
            prefill_s=self._prefill_s,
        )

    def _mode_used(self) -> SpeculationMode:
        """What was actually done: `auto` is a way to choose, not a way to decode."""
        if self.mode is not SpeculationMode.AUTO:
            return self.mode
        return SpeculationMode.PARALLEL if self._num_drafts else SpeculationMode.OFF
