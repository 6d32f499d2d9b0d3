"""Our own model in a child process of `bench peers`: makes prompts and times their prefill."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import GenerationRequest

if TYPE_CHECKING:
    from vidspec_models.prompt import Prompt


class VidspecModel:
    """A model as a worker loads it, to time the prefill of a finished prompt without the vision tower."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        import torch

        from vidspec_models.loading.load_model import load_model

        torch.set_num_threads(threads)
        self._model = load_model(spec)
        self._prompts: dict[str, Prompt] = {}

    def end_id(self) -> int:
        """The token that ends an answer."""
        return min(self._model.stop_ids)

    def embeddings(self, request: GenerationRequest) -> NDArray[np.float32]:
        """Embeddings [P, hidden size] of the request's prompt, with the video's features merged in."""
        found: NDArray[np.float32] = self._prompt(request).embeddings.float().numpy()
        return found

    def prefill_s(self, request: GenerationRequest, chunk: int) -> float:
        """Seconds of the second prefill of its prompt: in the first, the tower's threads still wait for more work."""
        from vidspec_models.decoder.kv_cache import KVCache

        prompt, began = self._prompt(request), 0.0
        for _ in range(2):
            cache, began = KVCache(self._model.decoder.geometry, prompt.num_tokens), time.monotonic()
            while self._model.prefill(prompt, cache, chunk) is None:
                pass
        return time.monotonic() - began

    def _prompt(self, request: GenerationRequest) -> Prompt:
        if (prompt := self._prompts.get(request.request_id)) is None:
            prompt = self._prompts[request.request_id] = self._model.prepare(request.turns, request.videos)
        return prompt
