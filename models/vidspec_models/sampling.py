"""Coupled sampling: logits to the one token that (distribution, seed, position) determine.

The token at output position t is `argmax(log p_t + g_t)`, p_t being the softmax after temperature, top-k and
top-p (in that order, as in transformers) and g_t Gumbel noise that depends only on (seed, t, token id).
By the Gumbel-max trick its law is exactly p_t; because the noise is shared, a draft whose logits agree proposes
the very token the target will choose. Temperature 0 is plain argmax; both terms of the sum are in `drawing`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_models.drawing import NOISE_ROWS, Noise, restricted_log_probabilities
from vidspec_models.request import SamplingParams

_MOST_MARGIN = 50.0


class CoupledSampler:
    """Chooses one request's tokens."""

    def __init__(self, params: SamplingParams, noise_rows: int = NOISE_ROWS) -> None:
        self._params = params
        self._noise = None if params.temperature == 0.0 else Noise(params.seed, noise_rows)

    def choose(self, logits: Tensor, first_position: int) -> list[int]:
        """Tokens for consecutive output positions; row i of logits [n, V] is position `first_position + i`."""
        return [int(token) for token in self.tokens(logits, first_position).tolist()]

    def tokens(self, logits: Tensor, first_position: int) -> Tensor:
        """The same as int64 [n] on the device, not waited for."""
        return self.scores(logits, first_position).argmax(-1)

    def scores(self, logits: Tensor, first_position: int) -> Tensor:
        """[n, V]: what the chosen tokens are the largest of."""
        if self._noise is None:
            return logits
        noise = self._noise.rows(first_position, len(logits), logits)
        return restricted_log_probabilities(logits, self._params) + noise

    @property
    def is_plain(self) -> bool:
        """No token is excluded: scores are `sharpness` times the logits, and `noise`, but for a constant."""
        return self._params.top_k == 0 and self._params.top_p == 1.0

    @property
    def sharpness(self) -> float:
        return 1.0 / (self._params.temperature or 1.0)

    def noise(self, first_position: int, count: int, like: Tensor) -> Tensor:
        """float32 [count, V] as [V] `like` has it; zeros for the greedy."""
        if self._noise is None:
            return like.new_zeros(count, like.shape[-1], dtype=torch.float32)
        return self._noise.rows(first_position, count, like)


def choose_all(choices: Sequence[tuple[CoupledSampler, Tensor, int]]) -> list[list[int]]:
    """`choose` of many requests, each with its logits and first position; the device is waited for once."""
    found = [sampler.tokens(logits, first_position) for sampler, logits, first_position in choices]
    together = [int(token) for token in (found[0] if len(found) == 1 else torch.cat(found)).tolist()]
    stops = list(itertools.accumulate(len(tokens) for tokens in found))
    return [together[stop - len(tokens) : stop] for stop, tokens in zip(stops, found, strict=True)]


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft's token and how sure it is: the probability that it, and not its runner-up, is the target's, too."""

    token: int
    confidence: float

    @classmethod
    def of(cls, token: int, margin: float) -> Guess:
        """`margin` is how far the runner-up's score is behind: a difference of log-probabilities, noise included."""
        return cls(token, 1.0 / (1.0 + math.exp(-min(margin, _MOST_MARGIN))))


def guess_all(choices: Sequence[tuple[CoupledSampler, Tensor, int]]) -> list[Guess]:
    """The next token of many requests, each with its logits [1, V] and position."""
    best = [sampler.scores(logits, position).topk(2) for sampler, logits, position in choices]
    tokens = torch.cat([found.indices[:, 0] for found in best]).tolist()
    margins = torch.cat([found.values[:, 0] - found.values[:, 1] for found in best]).tolist()
    return [Guess.of(int(token), margin) for token, margin in zip(tokens, margins, strict=True)]
