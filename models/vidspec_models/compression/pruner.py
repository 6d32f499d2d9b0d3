"""KVPruner: DyCoke's second stage for one request: while it decodes, later layers attend to few of its video rows.

The paper selects anew for every row. Here the rows of a period of `REFRESH_TOKENS` share one selection, made by the
first of them, and no forward crosses from one period into the next: which rows are hidden from a row is then a
function of the tokens before its period, however many rows of proposals are scored together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_models.compression.dycoke import REFRESH_TOKENS, DyCoke, num_left
from vidspec_models.compression.hiding import begin_hiding, change_hidden
from vidspec_models.compression.selection import attention_of_row, hidden_by, still_stands
from vidspec_models.decoder import Decoder, Segment
from vidspec_models.inputs import Prompt
from vidspec_models.kv_cache import KVCache
from vidspec_models.preservation import cell_rows


@dataclass(frozen=True, slots=True)
class KVPruner:
    """What is fixed for a request; what is hidden at the moment lies in its cache, and goes with it."""

    candidates: Tensor  # int64 [C]: prompt rows that are cells of a frame
    num_hidden: int
    first_layer: int
    num_prompt_rows: int

    @classmethod
    def of(cls, prompt: Prompt, dycoke: DyCoke, num_layers: int) -> KVPruner | None:
        """None where nothing would ever be hidden: too little video, P of 0, a model of at most L layers."""
        candidates = prompt.is_video.nonzero()[:, 0][cell_rows(prompt)]
        num_hidden = len(candidates) - max(1, num_left(len(candidates), dycoke.hide_ratio))
        if num_hidden <= 0 or dycoke.layer >= num_layers:
            return None
        return cls(candidates, num_hidden, dycoke.layer, prompt.num_tokens)

    def num_rows_left(self, cache_length: int) -> int:
        """Rows that the next forward may have at most, the cache being so long, to stay within a period."""
        return REFRESH_TOKENS - (cache_length - self.num_prompt_rows) % REFRESH_TOKENS

    def refresh(self, decoder: Decoder, cache: KVCache, token: int, position: int) -> None:
        """Before a forward whose first row is `token`: if it opens a period, choose what is hidden in it.

        Costs the first L layers for one row. Raises ValueError while the prompt is not in the cache.
        """
        if cache.length < self.num_prompt_rows:
            raise ValueError("the cache does not hold the whole prompt yet")
        if (cache.length - self.num_prompt_rows) % REFRESH_TOKENS:
            return
        attention = self._attention(decoder, cache, token, position)
        if cache.hidden is not None and still_stands(attention, cache.hidden.attention):
            return
        hidden = self.candidates[hidden_by(attention, self.num_hidden)]
        if cache.hidden is None:
            begin_hiding(cache, hidden, self.first_layer, int(self.candidates[-1]) + 1, attention)
        else:
            change_hidden(cache, cache.hidden, hidden, attention)

    def _attention(self, decoder: Decoder, cache: KVCache, token: int, position: int) -> Tensor:
        """What the row pays to each candidate in the layer before the first pruned one."""
        device = decoder.embedding.device
        seen: dict[int, Tensor] = {}
        decoder.forward(
            decoder.embed(torch.tensor([token], device=device)),
            decoder.rotary(torch.tensor([position], device=device)),
            [Segment(cache, cache.length, 1)],
            observer=seen.__setitem__,
            num_layers=self.first_layer,
        )
        layer = self.first_layer - 1
        keys = cache.keys_of(layer)[:, : cache.length + 1]
        return attention_of_row(seen[layer][0], keys, decoder.scale).to(self.candidates.device)[self.candidates]
