"""Splits a training step into small units run by single-threaded workers.

On a shared CPU this beats multi-threaded operators: those wait at every operator for the slower core, while
workers simply take fewer units. Results are the same whichever worker takes which unit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
_CPU_UNIT_CLIPS = 2


class Workers:
    """A fixed set of threads; with one worker everything runs in the caller."""

    def __init__(self, device: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count) if device == "cpu" and count > 1 else None
        if self._pool is not None:
            torch.set_num_threads(1)
        self._is_cpu = device == "cpu"
        self._warm: set[object] = set()

    def units(self, num_clips: int) -> list[slice]:
        """The clips of a step, cut into what one worker takes at a time."""
        size = _CPU_UNIT_CLIPS if self._is_cpu else num_clips
        return [slice(start, start + size) for start in range(0, num_clips, size)]

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], key: object = None) -> list[Result]:
        """Results in order. The first item of a new `key` runs alone, so that compilation happens once."""
        if self._pool is None:
            return [function(item) for item in items]
        first: list[Result] = []
        if key is not None and key not in self._warm:
            first, items = [function(items[0])], items[1:]
            self._warm.add(key)
        return first + list(self._pool.map(function, items))


class GradientSum:
    """Adds up the gradients of units from several threads into `.grad`."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        self._params = params
        self._lock = threading.Lock()

    def add(self, loss: torch.Tensor, share: float) -> None:
        """Back-propagate `share * loss`; parameters without a part in it stay untouched."""
        gradients = torch.autograd.grad(loss * share, self._params, allow_unused=True)
        with self._lock, torch.no_grad():
            for param, gradient in zip(self._params, gradients, strict=True):
                if gradient is not None:
                    param.grad = gradient if param.grad is None else param.grad.add_(gradient)
