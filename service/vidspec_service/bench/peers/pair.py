"""What a peer is asked and answers, and the loop of every engine that offers steps rather than a loop of its own.

That loop is the plain one of llama.cpp's examples: greedy, and for speculation so many tokens of the draft, then all of
them in one batch of the target. Between two steps there is a lookup in logits, some microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

CONTEXT = 1024  # tokens
MOST_DRAFT_TOKENS = 63

Embeddings = NDArray[np.float32]  # [P, hidden size], of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """One prompt as either model takes it in, features merged."""

    place: int  # among the prompts of the run
    target: Embeddings
    draft: Embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """Times are of the monotonic clock."""

    ids: tuple[int, ...]  # the end token included
    began: float
    prefilled: float  # the target's prompt is done
    times: tuple[float, ...]  # of what was committed together; the first once the draft's prompt is done, too
    num_first: int = 1  # tokens that were there at the first of `times`
    num_judged: int = 0  # as `SpeculationStats` has it
    num_accepted: int = 0


class Peer(Protocol):
    """Another engine with the pair's language models, made in a child process."""

    def answer(self, prompt: PromptRows, max_tokens: int, num_draft_tokens: int) -> PeerAnswer:
        """Greedy; the target alone without draft tokens."""


def ask(peer: Peer, prompt: PromptRows, max_tokens: int, num_draft_tokens: int) -> PeerAnswer:
    """`peer.answer`, for a child that holds any peer."""
    return peer.answer(prompt, max_tokens, num_draft_tokens)


class StepModel(Protocol):
    """One model with one sequence in its cache."""

    length: int  # rows in the cache

    def prefill(self, embeddings: Embeddings) -> int:
        """The token after a new prompt."""

    def step(self, ids: Sequence[int], num_wanted: int) -> list[int]:
        """Append tokens; the likeliest after each of the last `num_wanted` of them."""

    def cut(self, length: int) -> None:
        """Forget every row from `length` on."""


class Pair:
    """A peer of two models in one process, one after the other."""

    def __init__(self, target: StepModel, draft: StepModel, end_id: int) -> None:
        self._target, self._draft, self._end_id = target, draft, end_id

    def answer(self, prompt: PromptRows, max_tokens: int, num_draft_tokens: int) -> PeerAnswer:
        """Greedy; the target alone without draft tokens."""
        began = time.monotonic()
        ids = [self._target.prefill(prompt.target)]
        prefilled = time.monotonic()
        if num_draft_tokens:
            self._draft.prefill(prompt.draft)
        times, num_judged, num_accepted = [time.monotonic()], 0, 0
        while len(ids) < max_tokens and ids[-1] != self._end_id:
            pending = self._drafted(ids, len(prompt.draft), num_draft_tokens)
            chosen = self._target.step([ids[-1], *pending], 1 + len(pending))
            right = next((i for i, (a, b) in enumerate(zip(pending, chosen, strict=False)) if a != b), len(pending))
            for token in chosen[: right + 1]:
                ids.append(token)
                if token == self._end_id or len(ids) == max_tokens:
                    break
            times.append(time.monotonic())
            self._target.cut(len(prompt.target) + len(ids) - 1)
            self._draft.cut(min(self._draft.length, len(prompt.draft) + len(ids) - 1))
            num_judged, num_accepted = num_judged + right + (right < len(pending)), num_accepted + right
        return PeerAnswer(
            ids=tuple(ids),
            began=began,
            prefilled=prefilled,
            times=tuple(times),
            num_judged=num_judged,
            num_accepted=num_accepted,
        )

    def _drafted(self, ids: Sequence[int], num_prompt_rows: int, count: int) -> list[int]:
        """So many tokens after `ids`, up to the end token."""
        found: list[int] = []
        feed = list(ids[self._draft.length - num_prompt_rows :])
        while len(found) < count:
            found += self._draft.step(feed, 1)
            if found[-1] == self._end_id:
                break
            feed = found[-1:]
        return found


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
