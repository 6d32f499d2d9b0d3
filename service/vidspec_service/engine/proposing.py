"""Proposer: draft tokens for every request with room, alternatives where it is in doubt, and how long a token takes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vidspec_models.token_sampling import Guess
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.drafting import Drafting
from vidspec_service.engine.messages import Proposal
from vidspec_service.engine.proposals import Doubt

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
        asked = [
            (_rows(drafting, drafting.missing), drafting.sampler, len(drafting.sequence.tokens)) for drafting in batch
        ]
        found = self._model.guess(asked, min(MOST_AT_ONCE, batch[0].num_left))
        took = (time.monotonic() - started) / max(map(len, found))
        self._pace_s = took if not self._pace_s else _PACE_MEMORY * self._pace_s + (1 - _PACE_MEMORY) * took
        return [self._said(drafting, guesses) for drafting, guesses in zip(batch, found, strict=True)]

    def alternative(self, drafting: Drafting, doubt: Doubt) -> Proposal | None:
        """How the chain would go on if the target took the runner-up there; None so near to the answer's limit."""
        if doubt.at + MOST_AT_ONCE >= drafting.max_tokens:
            return None
        at, guess = doubt.at, doubt.guess
        cache, start = drafting.cache, min(drafting.cache.length, drafting.prompt.num_tokens + at)
        with cache.detour(start, drafting.prompt.num_tokens + at - start + 1 + MOST_AT_ONCE):
            rows = _rows(drafting, [*drafting.missing_before(at), guess.runner_up])
            (found,) = self._model.guess([(rows, drafting.sampler, at + 1)], MOST_AT_ONCE)
        # That the chain breaks here is given when this comes to be looked at: only what follows is in doubt.
        guesses = [Guess(guess.runner_up, guess.token, 1.0), *found]
        drafting.sequence.remember(at, guesses)
        return self._proposal(drafting, drafting.sequence.epoch, at, guesses, is_alternative=True)

    def _said(self, drafting: Drafting, guesses: list[Guess]) -> Proposal:
        return self._proposal(drafting, *drafting.sequence.propose(guesses), is_alternative=False)

    def _proposal(
        self, drafting: Drafting, epoch: int, start: int, guesses: Sequence[Guess], *, is_alternative: bool
    ) -> Proposal:
        return Proposal(
            request_id=drafting.request_id,
            epoch=epoch,
            start=start,
            ids=tuple(guess.token for guess in guesses),
            is_alternative=is_alternative,
            confidences=tuple(guess.confidence for guess in guesses),
            step_s=self._pace_s,
            video_tokens=drafting.view.num_video_tokens,
        )


def _rows(drafting: Drafting, ids: Sequence[int]) -> StepRows:
    return StepRows(
        cache=drafting.cache,
        ids=ids,
        position=drafting.prompt.next_position + drafting.cache.length - drafting.prompt.num_tokens,
    )
