"""Rows of a cache that the later layers store and do not attend to: what DyCoke's second stage leaves out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_models.decoder.placement import LayerSpan


@dataclass(slots=True)
class HiddenRows:
    """The layers from `first_layer` on keep them in their first `count` places.

    `order` says which row lies in each of the first R places of those layers; from R on every row is in its own.
    """

    first_layer: int
    count: int
    order: Tensor  # int64 [R]
    attention: Tensor  # float32 [candidates]: what the choice was made by

    def within(self, span: LayerSpan, mask: Tensor | None, block: int) -> tuple[int, int, Tensor | None]:
        """Of a span of layers: how many see every row; behind how many rows the others' attention starts; their mask.

        Hidden rows that fill whole blocks are skipped; the rest is closed in the mask, by a large number instead of
        -inf: a kernel that meets nothing but -inf in its first part would make a NaN.
        """
        whole = len(range(span.layers.start, min(self.first_layer, span.layers.stop)))
        skipped = self.count // block * block
        if mask is None:
            return whole, skipped, None
        closed = mask[:, skipped:].clone()
        closed[:, : self.count - skipped] = torch.finfo(mask.dtype).min / 4
        return whole, skipped, closed
