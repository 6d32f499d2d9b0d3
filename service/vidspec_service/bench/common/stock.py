"""Stock transformers on the target, in a child process: the peer of `bench speed` and `bench peers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import GenerationRequest

if TYPE_CHECKING:
    from vidspec_models.reference.stock import StockAnswer


class StockModel:
    """Made where it answers: it imports torch."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        import torch

        from vidspec_models.reference.stock import load_stock

        torch.set_num_threads(threads)
        self._generator = load_stock(spec)

    def answer(self, request: GenerationRequest) -> StockAnswer:
        """One generation."""
        assert request.max_tokens is not None, "stock `generate` has no limit of its own"
        return self._generator.answer(request.turns, request.videos, request.max_tokens, request.sampling)

    def prefill_s(self, embeddings: NDArray[np.float32]) -> float:
        """Of a prompt's embeddings [P, hidden size]."""
        return self._generator.prefill_s(embeddings)
