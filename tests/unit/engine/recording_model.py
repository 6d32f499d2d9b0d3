"""RecordingModel: its cache rows hold the tokens that made them, and its next token depends on all those rows.

So an extra, missing, stale or misplaced row changes the text. `Gate` lets a test stop a loop inside its model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.unit.engine.counting_model import CELLS, CountingModel
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.prompt import Prompt
from vidspec_models.request import SamplingParams, Turn, Video
from vidspec_models.sampling import CoupledSampler, DraftToken
from vidspec_models.video_lm import StepRows

VIDEO = -1  # the id of a prompt row that stands for a frame
Row = tuple[int, int]  # token, rotary position
_TIMEOUT_S = 20.0


class Gate:
    """Open until it is shut; then a thread that enters waits to be let through."""

    def __init__(self) -> None:
        self._is_shut = False
        self._here, self._let = threading.Semaphore(0), threading.Semaphore(0)

    def shut(self) -> None:
        self._is_shut = True

    def wait_reached(self) -> None:
        """Wait until a thread, or another thread, waits at the gate."""
        assert self._here.acquire(timeout=_TIMEOUT_S), "nobody came to the gate"

    def let_through(self) -> None:
        """Let the waiting thread pass; the gate stays shut."""
        self._let.release()

    def open(self) -> None:
        """Let the waiting thread and all later ones pass."""
        self._is_shut = False
        self._let.release()

    def enter(self) -> None:
        """Called by the model."""
        if self._is_shut:
            self._here.release()
            assert self._let.acquire(timeout=_TIMEOUT_S), "nobody opened the gate"


class RecordingModel(CountingModel):
    """The distribution of the next token depends on token and position of every text row in the cache, on nothing else.

    As a draft it agrees with the target at `agreement` of 10 positions, and proposes up to `most` tokens at a time.
    """

    def __init__(self, *, vocabulary: int = 32, agreement: int = 10, salt: int = 0) -> None:
        self.vocabulary, self.agreement, self._salt = vocabulary, agreement, salt
        self.gates = {name: Gate() for name in ("prepare", "prefill", "step")}
        self.chunks: list[int] = []  # rows of every prefill
        self.steps: list[list[tuple[int, ...]]] = []  # the new rows' ids of every forward, by sequence
        self.strides: list[int] = []  # tokens asked for in each `decode` call
        self.most_kept = 1000  # tokens that a `decode` call keeps
        self.longest_s = 0.0  # time limit of the last `decode` call

    def prepare(self, turns: Sequence[Turn], videos: Sequence[Video], encoded: EncoderCache, *_: object) -> Prompt:
        self.gates["prepare"].enter()
        prompt = super().prepare(turns, videos, encoded)
        # An answer's positions do not continue at the number of rows, as in families with several position axes.
        return replace(
            prompt, ids=(VIDEO,) * CELLS + prompt.ids[CELLS:], next_position=prompt.next_position + 5
        )  # fmt: skip

    def prefill(self, prompt: Prompt, cache: KVCache, num_rows: int, observer: Any = None) -> Tensor | None:
        self.gates["prefill"].enter()
        self.chunks.append(num_rows)
        self._put(cache, prompt_rows(prompt)[cache.length : cache.length + num_rows])
        return self._scores(_folded(0, rows_of(cache))) if cache.length == prompt.num_tokens else None

    def step(self, batch: Sequence[StepRows]) -> list[Tensor]:
        self.gates["step"].enter()
        self.steps.append([tuple(rows.ids) for rows in batch])
        return [self._append(rows.cache, answer_rows(rows.ids, rows.position)) for rows in batch]

    def decode(
        self, rows: StepRows, sampler: CoupledSampler, prefix: Sequence[int], most: int, longest_s: float
    ) -> list[int]:
        self.strides.append(most)
        self.longest_s = longest_s
        before, found = rows.cache.length, list[int]()
        for number in range(most):
            scores = self._append(rows.cache, answer_rows(found[-1:] or rows.ids, rows.position + number))
            found += sampler.sample(scores, [*prefix, *found])
        kept = min(most, self.most_kept)
        rows.cache.truncate(before + kept)
        return found[:kept]

    def propose(
        self, batch: Sequence[tuple[StepRows, CoupledSampler, Sequence[int]]], most: int
    ) -> list[list[DraftToken]]:
        """All draft tokens but the last go into the cache, as in `VideoLM.propose`."""
        self.gates["step"].enter()
        found = []
        for rows, sampler, prefix in batch:
            ids, proposed, at = list(rows.ids), list[DraftToken](), len(prefix)
            for number in range(1 + hash((self._salt, at)) % most if len(batch) == 1 else 1):
                position = rows.position if not number else rows.position + len(rows.ids) + number - 1
                scores = self._append(rows.cache, answer_rows(ids, position))[-1:]
                proposed.append(
                    self._draft_token(
                        sampler.sample(scores, [*prefix, *(each.token for each in proposed)])[0], rows_of(rows.cache)
                    )
                )
                ids = [proposed[-1].token]
            found.append(proposed)
        return found

    def answer(self, prompt: Prompt, num_tokens: int, sampler: CoupledSampler | None = None) -> list[int]:
        """The reference: the target's answer to a prompt, computed without a cache; greedy without a sampler."""
        sampler = sampler or CoupledSampler(SamplingParams())
        state, ids = _folded(0, prompt_rows(prompt)), list[int]()
        for number in range(num_tokens):
            ids += sampler.sample(self._scores(state)[None], ids)
            state = _folded(state, answer_rows(ids[-1:], prompt.next_position + number))
        return ids

    def _append(self, cache: KVCache, rows: Sequence[Row]) -> Tensor:
        """Put rows into the cache and return the scores [n, V] after each."""
        state, scores = _folded(0, rows_of(cache)), []
        for row in rows:
            state = _folded(state, [row])
            scores.append(self._scores(state))
        self._put(cache, rows)
        return torch.stack(scores)

    def _put(self, cache: KVCache, rows: Sequence[Row]) -> None:
        """Put rows into the cache; fails if they do not fit."""
        end = cache.length + len(rows)
        cache.keys[0, 0, 0, cache.length : end] = torch.tensor(rows, dtype=torch.float32)
        cache.length = end

    def _scores(self, state: int) -> Tensor:
        return torch.tensor([hash((state, token)) % 9973 / 2000 for token in range(self.vocabulary)])

    def _draft_token(self, right: int, rows: list[Row]) -> DraftToken:
        dice = hash((self._salt, _folded(0, rows)))
        is_right = dice % 10 < self.agreement
        token = right if is_right else (right + 1 + dice // 10 % (self.vocabulary - 1)) % self.vocabulary
        return DraftToken(token, 0.999 if self.agreement == 10 else (1 + dice // 1000 % 100) / 101)


def prompt_rows(prompt: Prompt) -> list[Row]:
    """The cache rows of a prompt."""
    return list(zip(prompt.ids, (int(position) for position in prompt.rotary[0][:, 0, 0].tolist()), strict=True))


def answer_rows(ids: Sequence[int], position: int) -> list[Row]:
    """The cache rows of consecutive tokens."""
    return list(zip(ids, range(position, position + len(ids)), strict=True))


def rows_of(cache: KVCache) -> list[Row]:
    """The rows in a cache."""
    return [(int(token), int(position)) for token, position in cache.keys[0, 0, 0, : cache.length].tolist()]


def _folded(state: int, rows: Sequence[Row]) -> int:
    """Hash `rows` into `state` without video rows: the draft sees fewer of them and may still give the same token."""
    for token, position in rows:
        if token != VIDEO:
            state = hash((state, token, position))
    return state
