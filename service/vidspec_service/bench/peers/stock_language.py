"""A language model of the bundled pair in stock modules whose real prompts can be given as ids.

Its input table is extended, after the vocabulary, by the rows of the prompts, with the video's features merged in. So
engines that only take ids read the same prompt as all others. Only child processes import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from vidspec_models.loading.spec import BUNDLED, ModelSpec
from vidspec_models.reference.stock import StockGenerator
from vidspec_service.bench.peers.pair import Embeddings


class StockLanguageModel(StockGenerator):
    """The language model of one role, in float32 on the CPU."""

    def __init__(self, role: str) -> None:
        super().__init__(ModelSpec(path=BUNDLED, role=role, device="cpu", dtype="float32"))
        self._vocabulary = self._model.get_input_embeddings()
        self.decoder = self._family.language_model
        self.head = self._model.lm_head
        self.model = self._model
        self.tokenizer = self._processor.tokenizer

    def extend(self, prompts: Sequence[Embeddings]) -> list[range]:
        """Put these prompts after the vocabulary, in place of earlier ones; returns the ids of each."""
        rows = [self._vocabulary.weight, *map(torch.from_numpy, prompts)]
        self.model.set_input_embeddings(torch.nn.Embedding.from_pretrained(torch.cat(rows)))
        return [range(*ends) for ends in pairwise(accumulate(map(len, rows)))]
