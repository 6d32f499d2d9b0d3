"""Chooses a step's token on the device and writes the next step's inputs there, in Triton.

So several steps run without the host: for a small model, launching a step, reading its logits and choosing a token take
a third of the step's time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton interprets the annotations of kernel arguments, so only constexpr is annotated.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits per program


def _best_two(logits, noise, inverse_temperature, state, bests, seconds, tokens, size,  # noqa: PLR0913
              BLOCK: tl.constexpr, IS_EARLY: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_there = token < size
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, made = tl.load(state), tl.load(state + 1)
    logit = tl.load(logits + row * size + token, mask=is_there, other=float("-inf")).to(tl.float32)
    score = logit * tl.load(inverse_temperature) + tl.load(noise + made * size + token, mask=is_there, other=0.0)
    best = tl.max(score, 0)
    chosen = tl.minimum(tl.min(tl.where(score == best, token, size), 0), size - 1)  # if NaN, any token
    tl.store(bests + block, best)
    tl.store(seconds + block, tl.max(tl.where(token == chosen, float("-inf"), score), 0))
    tl.store(tokens + block, chosen.to(tl.int64))


def _advance(bests, seconds, tokens, ids, positions, rows, blocks, state, found, num_blocks,  # noqa: PLR0913
             BLOCKS: tl.constexpr, ROWS: tl.constexpr, IS_EARLY: tl.constexpr):  # fmt: skip
    block, row = tl.arange(0, BLOCKS), tl.arange(0, ROWS)
    is_there = block < num_blocks
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    best = tl.load(bests + block, mask=is_there, other=float("-inf"))
    second = tl.load(seconds + block, mask=is_there, other=float("-inf"))
    top = tl.max(best, 0)
    first = tl.minimum(tl.min(tl.where(best == top, block, BLOCKS), 0), num_blocks - 1)
    token = tl.load(tokens + first)
    runner_up = tl.max(tl.where(block == first, second, best), 0)
    last, made = tl.load(state), tl.load(state + 1)
    position, place = tl.load(positions + last) + 1, tl.load(rows + last * 4 + 3) + 1
    tl.store(found + made * 2, token.to(tl.float64))
    tl.store(found + made * 2 + 1, (top - runner_up).to(tl.float64))
    tl.debug_barrier()  # the stores below overwrite what was read above
    tl.store(ids, token)
    tl.store(positions, position)
    tl.store(rows + row * 4 + 3, tl.where(row == 0, place, -1))
    tl.store(blocks + 4, made * 0 + 1)
    tl.store(blocks + 5, place)
    tl.store(state, made * 0)
    tl.store(state + 1, made + 1)


class CudaSampler:
    """Chooses up to `most` successive tokens of one request; `options` are passed to every launch."""

    def __init__(self, most: int, vocabulary: int, device: torch.device, options: Mapping[str, Any]) -> None:
        self._num_blocks = triton.cdiv(vocabulary, _BLOCK)
        self._noise = torch.full((most, vocabulary), float("-inf"), device=device)  # ids without a token never win
        self._inverse_temperature = torch.ones(1, device=device)
        self._found = torch.zeros(most, 2, dtype=torch.float64, device=device)
        self._scores = torch.empty(2, self._num_blocks, device=device)
        self._tokens = torch.empty(self._num_blocks, dtype=torch.int64, device=device)
        self._options = options
        self._best: Any = triton.jit(_best_two)
        self._next: Any = triton.jit(_advance)

    def begin(self, noise: Tensor, inverse_temperature: float) -> None:
        """Start a run: each next token maximises `inverse_temperature` times logit plus noise float32 [count, V]."""
        self._noise[: noise.shape[0], : noise.shape[1]] = noise
        self._inverse_temperature.fill_(inverse_temperature)

    def sample(
        self, logits: Tensor, ids: Tensor, positions: Tensor, rows: Tensor, blocks: Tensor, state: Tensor
    ) -> None:
        """Choose the token after row `state[0]` of logits [n, V]; write the inputs (see `batch`) of its own step."""
        size = logits.shape[1]
        bests, seconds = self._scores
        self._best[(self._num_blocks,)](
            logits, self._noise, self._inverse_temperature, state, bests, seconds, self._tokens, size,
            BLOCK=_BLOCK, num_warps=8, **self._options,
        )  # fmt: skip
        self._next[(1,)](
            bests, seconds, self._tokens, ids, positions, rows, blocks, state, self._found, self._num_blocks,
            BLOCKS=triton.next_power_of_2(self._num_blocks), ROWS=len(ids), num_warps=1, **self._options,
        )  # fmt: skip

    def found(self, count: int) -> tuple[list[int], list[float]]:
        """The first `count` tokens of the run, and each one's lead over the second best; waits for the device."""
        tokens, margins = zip(*self._found[:count].tolist(), strict=True)
        return [int(token) for token in tokens], list(margins)
