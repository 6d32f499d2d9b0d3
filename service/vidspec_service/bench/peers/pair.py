"""The interface of a peer, and the decoding loop for engines that offer only steps, no loop of their own.

The loop is that of llama.cpp's examples: greedy; with speculation, the draft makes a fixed number of tokens, which the
target verifies in one batch. Between two steps there is only an argmax over logits, some microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vidspec_service.bench.common.samples import Sample
from vidspec_service.engine.speculation.proposals import num_before_end, num_equal
from vidspec_service.engine.types import SpeculationStats

CONTEXT = 1024  # tokens
MAX_DRAFT_TOKENS = 63

Embeddings = NDArray[np.float32]  # [P, hidden size], of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbeddings:
    """One prompt as embeddings for each model, with the video's features merged in."""

    index: int  # among the prompts of the run
    target: Embeddings
    draft: Embeddings


# The answer, whose first time is after the draft's prefill, too; and the seconds of the target's prefill.
PeerAnswer = tuple[Sample, float]


class Peer(Protocol):
    """Another engine with the pair's language models, created in a child process."""

    def answer(self, prompt: PromptEmbeddings, max_tokens: int, num_draft_tokens: int) -> PeerAnswer:
        """Answer greedily; with 0 draft tokens, by the target alone."""


def answer_with(peer: Peer, prompt: PromptEmbeddings, max_tokens: int, num_draft_tokens: int) -> PeerAnswer:
    """`peer.answer` as a function, for `Child.call`: the process may hold any peer."""
    return peer.answer(prompt, max_tokens, num_draft_tokens)


class StepModel(Protocol):
    """One model with one sequence in its cache."""

    length: int  # rows in the cache

    def prefill(self, embeddings: Embeddings) -> int:
        """Prefill a new prompt; returns the token after it."""

    def step(self, ids: Sequence[int], num_wanted: int) -> list[int]:
        """Append tokens; returns the likeliest token after each of the last `num_wanted`."""

    def truncate(self, length: int) -> None:
        """Drop the cache rows from `length` on."""


class Pair(Peer):
    """A peer made of two step models that take turns in one process."""

    def __init__(self, target: StepModel, draft: StepModel, end_id: int) -> None:
        self._target, self._draft, self._end_id = target, draft, end_id

    def answer(self, prompt: PromptEmbeddings, max_tokens: int, num_draft_tokens: int) -> PeerAnswer:
        began = time.monotonic()
        ids = [self._target.prefill(prompt.target)]
        prefilled = time.monotonic()
        if num_draft_tokens:
            self._draft.prefill(prompt.draft)
        times, num_judged, num_accepted = [time.monotonic()], 0, 0
        while len(ids) < max_tokens and ids[-1] != self._end_id:
            pending = self._drafted(ids, len(prompt.draft), num_draft_tokens)
            chosen = self._target.step([ids[-1], *pending], 1 + len(pending))
            right = num_equal(pending, chosen)
            committed = chosen[: min(right + 1, max_tokens - len(ids))]
            committed = committed[: num_before_end(committed, [self._end_id]) + 1]
            ids += committed
            times.append(time.monotonic())
            self._target.truncate(len(prompt.target) + len(ids) - 1)
            self._draft.truncate(min(self._draft.length, len(prompt.draft) + len(ids) - 1))
            num_judged += min(len(committed), len(pending))  # as everywhere: none after the answer's end
            num_accepted += min(len(committed), right)
        sample = Sample(
            ids=tuple(ids),
            prompt_tokens=len(prompt.target),
            submitted=began,
            times=tuple(times),
            speculation=SpeculationStats(num_draft_tokens=num_judged, num_accepted_tokens=num_accepted),
        )
        return sample, prefilled - began

    def _drafted(self, ids: Sequence[int], num_prompt_rows: int, count: int) -> list[int]:
        """`count` draft tokens after `ids`, or fewer if the draft ends the answer."""
        found: list[int] = []
        feed = list(ids[self._draft.length - num_prompt_rows :])
        while len(found) < count:
            found += self._draft.step(feed, 1)
            if found[-1] == self._end_id:
                break
            feed = found[-1:]
        return found


class Step(NamedTuple):
    """Tokens that arrived together."""

    time: float
    num_tokens: int


def sample_of_stream(
    prompt_tokens: int, ids: Sequence[int], steps: Sequence[Step], num_draft_tokens: int, *, began: float, untimed: int
) -> Sample:
    """The first `untimed` steps included prefills; rates and acceptance use only the steps after them."""
    timed = steps[untimed:]
    accepted = [step.num_tokens - 1 for step in timed] if num_draft_tokens else []
    # The last step is not counted as rejected: it may be short only because the answer ended.
    num_rejected = sum(right < num_draft_tokens for right in accepted[:-1])
    num_accepted = sum(accepted)
    return Sample(
        ids=tuple(ids),
        prompt_tokens=prompt_tokens,
        submitted=began,
        times=tuple(step.time for step in steps[untimed - 1 :]),
        num_first=sum(step.num_tokens for step in steps[:untimed]),
        speculation=SpeculationStats(num_draft_tokens=num_accepted + num_rejected, num_accepted_tokens=num_accepted),
    )
