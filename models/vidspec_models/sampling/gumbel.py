"""Counter-based Gumbel noise: a pure function of (seed, output position, token id), the same on every device.

Generator: Philox-4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
Counter (token id // 4, position, 0, 0), key = the two halves of the seed; the word `token id % 4` is that token's.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_ROUNDS = 10


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
