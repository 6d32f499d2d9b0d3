"""The two terms of Gumbel-max sampling: log-probabilities (temperature, top-k, top-p, min-p) and Gumbel noise.

The noise is a pure function of (seed, output position, token id), the same on every device. Generator: Philox-4x32
with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Counter (token id // 4,
position, 0, 0), key = the two halves of the seed; a token uses output word `token id % 4`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vidspec_models.request import SamplingParams

NOISE_ROWS = 32
_MAX_AT_ONCE = 2**15  # numbers that a CPU makes at a time: what they need beyond its caches is slow
MIN_TEMPERATURE = 1e-6  # except 0, which is greedy
_WEIGHT_OF_BEST = 2**40  # of the likeliest token, in the integers that top-p adds up: int64 has room for 2**22 of them
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


class GumbelNoise:
    """One seed's Gumbel noise; made and kept for several positions at a time where that is cheaper."""

    def __init__(self, seed: int, num_rows: int) -> None:
        self._seed = seed
        self._num_rows = num_rows
        self._first = 0  # output position of the first row kept
        self._kept: Tensor | None = None  # [rows, V]

    def rows(self, first: int, count: int, like: Tensor) -> Tensor:
        """float32 [count, V] for consecutive output positions, with V and the device of `like` [..., V]."""
        if self._kept is None or not self._first <= first <= self._first + len(self._kept):
            self._kept, self._first = like.new_empty(0, like.shape[-1], dtype=torch.float32), first
        start = first - self._first
        missing = start + count - len(self._kept)
        if missing > 0:
            width = like.shape[-1]
            at_once = self._num_rows if like.device.type == "cuda" else _MAX_AT_ONCE // width
            at_once = min(max(at_once, 1), self._num_rows)
            begin = self._first + len(self._kept)
            positions = torch.arange(begin, begin + max(missing, at_once), device=like.device)
            made = [gumbel_noise(self._seed, some, width) for some in positions.split(at_once)]
            self._kept, self._first, start = torch.cat([self._kept[start:], *made]), first, 0
        return self._kept[start : start + count]


def filtered_log_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """log p after temperature, top-k, top-p and min-p; excluded tokens are -inf. [n, V] float32.

    The most likely token always survives, with 0: a constant changes neither argmax nor min-p, which excludes tokens
    less likely than `min_p` times the likeliest (Nguyen et al., arXiv 2407.01082). Temperatures below MIN_TEMPERATURE
    are raised to it: smaller ones would make logits overflow float32.

    No floating-point numbers are added up: on a GPU their order, and so the last bit of the sum, depends on where a row
    begins in memory and on how many rows there are.
    """
    scores = logits.float() / max(params.temperature, MIN_TEMPERATURE)
    scores = scores - scores.amax(-1, keepdim=True)
    vocabulary = scores.shape[-1]
    if 0 < params.top_k < vocabulary:
        threshold = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < threshold, float("-inf"))
    if params.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        weights = (ordered.double().exp() * _WEIGHT_OF_BEST).long()
        before = weights.cumsum(-1) - weights
        beyond = before.double() >= params.top_p * weights.sum(-1, keepdim=True).double()
        excluded = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, beyond)
        scores = scores.masked_fill(excluded, float("-inf"))
    if params.min_p > 0.0:
        scores = scores.masked_fill(scores < math.log(params.min_p), float("-inf"))
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
