"""OracleDraft: a draft that computes all it would compute, and is then told what to propose.

Acceptance is a property of trained models. Here it is imposed: with a given probability the proposed token is the one
that the target chose when it was alone, else it is another one. What is measured is the machinery, at that acceptance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from vidspec_models.decoder import Decoder, QueryObserver
from vidspec_models.encoded_videos import EncodedVideos
from vidspec_models.families.base import Family
from vidspec_models.inputs import Prompt, Turn, Video
from vidspec_models.kv_cache import KVCache
from vidspec_models.synthetic.recipe import Oracle, Recipe, prompt_index
from vidspec_models.video_lm import StepLogits, StepRows, VideoLM


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What to propose at every output position of one request, and where the positions begin in its cache."""

    prompt_tokens: int
    tokens: tuple[int, ...]


def told_tokens(reference: Sequence[int], acceptance: float, seed: int, index: int, num_tokens: int) -> tuple[int, ...]:
    """The reference with a share of 1 - acceptance replaced by other tokens; a function of (seed, prompt index).

    A reference token that the draft does not have is replaced, too.
    """
    random = np.random.default_rng((seed, index))
    is_right = random.random(len(reference)) < acceptance
    others = random.integers(1, num_tokens, len(reference))  # how far off a wrong one is, at least 1
    return tuple(
        token if right and token < num_tokens else (token + int(other)) % num_tokens
        for token, right, other in zip(reference, is_right, others, strict=True)
    )


class OracleDraft(VideoLM):
    """The draft of a synthetic pair. A position beyond the reference keeps the draft's own choice."""

    def __init__(
        self, model: Any, family: Family, decoder: Decoder, recipe: Recipe, oracle: Oracle, step: StepLogits | None
    ) -> None:
        super().__init__(model, None, family, decoder, frozenset(), step)
        self._run_ahead = None  # the oracle has its say after every step
        self._oracle = oracle
        self._recipe = recipe
        self._indices: dict[tuple[int, ...], int] = {}  # a prompt's words, which no pruning takes, to its index
        self._told: WeakKeyDictionary[KVCache, _Told] = WeakKeyDictionary()

    def prepare(self, turns: Sequence[Turn], videos: Sequence[Video], encoded: EncodedVideos | None = None) -> Prompt:
        """As any model; remembers which prompt this is."""
        prompt = super().prepare(turns, videos, encoded)
        self._indices[self._words(prompt)] = prompt_index(turns[-1].text)
        return prompt

    def prefill(
        self, prompt: Prompt, cache: KVCache, num_rows: int, observer: QueryObserver | None = None
    ) -> Tensor | None:
        """As any model; with the first chunk the oracle learns what this cache's request will be told."""
        if cache.length == 0 or cache not in self._told:
            self._told[cache] = self._learn(prompt)
        return super().prefill(prompt, cache, num_rows, observer)

    @torch.inference_mode()
    def step(self, batch: Sequence[StepRows]) -> list[Tensor]:
        """The true forward; then the told token's logit is raised above all."""
        logits = super().step(batch)
        for rows, scores in zip(batch, logits, strict=True):
            told = self._told.get(rows.cache)
            position = rows.cache.length - told.prompt_tokens if told is not None else -1
            if told is not None and 0 <= position < len(told.tokens):
                scores[-1, told.tokens[position]] = float("inf")
        return logits

    def _words(self, prompt: Prompt) -> tuple[int, ...]:
        return prompt.ids[-self._recipe.pair_shape.text_tokens :]

    def _learn(self, prompt: Prompt) -> _Told:
        oracle, index = self._oracle, self._indices[self._words(prompt)]
        references = json.loads(Path(oracle.references).read_text(encoding="utf-8"))
        reference = references.get(str(index), [])
        num_tokens = self._recipe.shape.num_tokens
        tokens = told_tokens(reference, oracle.acceptance, oracle.seed, index, num_tokens)
        return _Told(prompt_tokens=prompt.num_tokens, tokens=tokens)
