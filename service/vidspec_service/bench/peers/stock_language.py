"""A language model of the bundled pair in stock modules, which ids alone can give the real prompts to.

Its input table goes on behind the vocabulary with the rows of prompts, features merged. So loops of engines that take
ids only still read the prompt that all others read. Only child processes import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vidspec_models.loading.spec import BUNDLED, ModelSpec
from vidspec_models.reference.stock import StockGenerator
from vidspec_service.bench.peers.pair import Embeddings


class StockLanguageModel(StockGenerator):
    """In float32 on the CPU."""

    def __init__(self, role: str) -> None:
        super().__init__(ModelSpec(path=BUNDLED, role=role, device="cpu", dtype="float32"))
        self._vocabulary = self._model.get_input_embeddings()
        self.decoder = self._family.language_model
        self.head = self._model.lm_head
        self.model = self._model
        self.tokenizer = self._processor.tokenizer

    def extend(self, prompts: Sequence[Embeddings]) -> list[range]:
        """Put these prompts behind the vocabulary in place of earlier ones; the ids of each."""
        rows = [self._vocabulary.weight, *map(torch.from_numpy, prompts)]
        self.model.set_input_embeddings(torch.nn.Embedding.from_pretrained(torch.cat(rows)))
        ids, start = [], len(self._vocabulary.weight)
        for prompt in prompts:
            ids.append(range(start, start + len(prompt)))
            start += len(prompt)
        return ids

    @property
    def table(self) -> Any:
        """The extended one, a module."""
        return self.model.get_input_embeddings()
