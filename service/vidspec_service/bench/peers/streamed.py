"""Answers of engines that have a loop of their own, from what their streamers were told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from vidspec_service.bench.peers.pair import PeerAnswer


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens that came together."""

    time: float
    num_tokens: int

    @classmethod
    def now(cls, num_tokens: int) -> Step:
        return cls(time.monotonic(), num_tokens)


def streamed(
    ids: Sequence[int], steps: Sequence[Step], num_draft_tokens: int, *, began: float, prefilled: float, untimed: int
) -> PeerAnswer:
    """`untimed` steps at the beginning had prompts in them; rates and acceptance are of those behind them."""
    timed = steps[untimed:]
    accepted = [step.num_tokens - 1 for step in timed] if num_draft_tokens else []
    # Whether a token was thrown away in the last step cannot be seen: it may as well have ended there.
    num_rejected = sum(right < num_draft_tokens for right in accepted[:-1])
    return PeerAnswer(
        ids=tuple(ids),
        began=began,
        prefilled=prefilled,
        times=tuple(step.time for step in steps[untimed - 1 :]),
        num_first=sum(step.num_tokens for step in steps[:untimed]),
        num_judged=sum(accepted) + num_rejected,
        num_accepted=sum(accepted),
    )
