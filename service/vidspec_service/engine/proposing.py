"""Proposer: draft tokens for every request with room, and how long one takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.drafting import Drafting
from vidspec_service.engine.messages import Proposal

MOST_AT_ONCE = 3  # tokens before the draft looks whether the target has said something
_PACE_MEMORY = 0.95


class Proposer:
    """Keeps the pace: seconds a token, as of late."""

    def __init__(self, model: VideoLM) -> None:
        self._model = model
        self._pace_s = 0.0

    def propose(self, batch: Sequence[Drafting]) -> list[Proposal]:
        """One forward for all; a request that is alone may get several tokens. Their caches have room for that."""
        started = time.monotonic()
        asked = [(_rows(drafting), drafting.sampler, len(drafting.sequence.tokens)) for drafting in batch]
        found = self._model.guess(asked, min(MOST_AT_ONCE, batch[0].num_left))
        took = (time.monotonic() - started) / max(map(len, found))
        self._pace_s = took if not self._pace_s else _PACE_MEMORY * self._pace_s + (1 - _PACE_MEMORY) * took
        proposals = []
        for drafting, guesses in zip(batch, found, strict=True):
            epoch, start = drafting.sequence.propose([guess.token for guess in guesses])
            proposals.append(
                Proposal(
                    request_id=drafting.request_id,
                    epoch=epoch,
                    start=start,
                    ids=tuple(guess.token for guess in guesses),
                    confidences=tuple(guess.confidence for guess in guesses),
                    step_s=self._pace_s,
                    video_tokens=drafting.view.num_video_tokens,
                )
            )
        return proposals


def _rows(drafting: Drafting) -> StepRows:
    return StepRows(
        cache=drafting.cache,
        ids=drafting.missing,
        position=drafting.prompt.next_position + drafting.cache.length - drafting.prompt.num_tokens,
    )
