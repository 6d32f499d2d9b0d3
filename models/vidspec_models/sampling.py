"""Coupled sampling: logits to the one token that (distribution, seed, position) determine.

The token at output position t is `argmax(log p_t + g_t)`, p_t being the softmax after temperature, top-k and
top-p (in that order, as in transformers) and g_t Gumbel noise that depends only on (seed, t, token id).
By the Gumbel-max trick its law is exactly p_t; because the noise is shared, a draft whose logits agree proposes
the very token the target will choose. Temperature 0 is plain argmax.

The noise is a pure function of (seed, output position, token id), the same on every device. Generator: Philox-4x32
with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Counter (token id // 4,
position, 0, 0), key = the two halves of the seed; the word `token id % 4` is that token's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_models.request import SamplingParams

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_NOISE_ROWS = 32
_MOST_MARGIN = 50.0


class CoupledSampler:
    """Chooses one request's tokens; keeps the noise of a run of positions, since making it in bulk is cheaper."""

    def __init__(self, params: SamplingParams, noise_rows: int = _NOISE_ROWS) -> None:
        self._params = params
        self._noise_rows = noise_rows
        self._first = 0  # output position of the first row of _noise
        self._noise: Tensor | None = None  # [rows, V]

    def choose(self, logits: Tensor, first_position: int) -> list[int]:
        """Tokens for consecutive output positions; row i of logits [n, V] is position `first_position + i`."""
        return [int(token) for token in self.tokens(logits, first_position).tolist()]

    def tokens(self, logits: Tensor, first_position: int) -> Tensor:
        """The same as int64 [n] on the device, not waited for."""
        return self.scores(logits, first_position).argmax(-1)

    def scores(self, logits: Tensor, first_position: int) -> Tensor:
        """[n, V]: what the chosen tokens are the largest of."""
        if self._params.temperature == 0.0:
            return logits
        noise = self._noise_for(first_position, len(logits), logits)
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
        if self._params.temperature == 0.0:
            return like.new_zeros(count, like.shape[-1], dtype=torch.float32)
        return self._noise_for(first_position, count, like)

    def _noise_for(self, first: int, count: int, logits: Tensor) -> Tensor:
        if self._noise is None or first < self._first or first + count > self._first + len(self._noise):
            self._first = first
            positions = torch.arange(first, first + max(count, self._noise_rows), device=logits.device)
            self._noise = gumbel_noise(self._params.seed, positions, logits.shape[-1])
        start = first - self._first
        return self._noise[start : start + count]


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


def restricted_log_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """log p after temperature, top-k and top-p; excluded tokens are -inf. [n, V] float32.

    The most likely token always survives top-p. Not renormalised: argmax does not see a constant.
    """
    scores = torch.log_softmax(logits.float() / params.temperature, dim=-1)
    vocabulary = scores.shape[-1]
    if 0 < params.top_k < vocabulary:
        threshold = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < threshold, float("-inf"))
    if params.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability
        excluded = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before >= params.top_p)
        scores = scores.masked_fill(excluded, float("-inf"))
    return scores


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> Tensor:
    """Four 32-bit words per counter, as int64 in [0, 2**32). Counters broadcast; result [..., 4]."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2**64, which keeps both 32-bit halves exact.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & _WORD, product0 & _WORD
        high1, low1 = (product1 >> 32) & _WORD, product1 & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def gumbel_noise(seed: int, positions: Tensor, vocabulary: int) -> Tensor:
    """Standard Gumbel noise, float32 [n, vocabulary], one row per output position (int64 [n])."""
    blocks = torch.arange(-(-vocabulary // 4), device=positions.device)
    zero = torch.zeros((), dtype=torch.int64, device=positions.device)
    key = (seed & _WORD, (seed >> 32) & _WORD)
    words = philox4x32((blocks[None, :], positions[:, None], zero, zero), key)
    uniform = (words.flatten(1)[:, :vocabulary].double() + 0.5) / 2.0**32
    return -(-uniform.log()).log().float()
