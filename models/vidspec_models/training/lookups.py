"""Lookups: three heads are trained where to attend, so that the target compares what it sees with what was asked.

"Is there T? Seen: T near the start, F near the middle, none near the end, so yes.": without this loss, the target never
learned to recognise that two letters are the same; one head that is trained to attend from each word to the same word
in the question learns it within minutes. A second head, some layers later, attends from the conclusion to the words
found in this way. A third one attends from the text about an object to the cells that show it: without it, the target
left out the middle one of three objects, or described another one twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from vidspec_models.bundled.render import OWNER_SIGN
from vidspec_models.training.examples import EVERY_THING, IGNORE, PackedText
from vidspec_models.training.forward import Layout, Rotary

_LIKENESS_LAYER, _SUBJECT_LAYER, _GROUNDS_LAYER = 3, 5, 6  # of the target's 8 layers, counted from 1
_THINGS = range(1, 4)
_OWNERS = (*_THINGS, *range(OWNER_SIGN, OWNER_SIGN + 3))  # all that a clip can show
_NOTHING = -1e4
_SETTLING_WEIGHT = 6.0


class LookupLoss:
    """Measures how far three heads are from attending where they should; pass its `next_mask` to the forward."""

    def __init__(self, layout: Layout, text: PackedText, owners: torch.Tensor) -> None:
        """`owners` [C, K]: the owners of the visual tokens that are present."""
        self._start, self._visual = layout.text.start, layout.visual
        self._owners = owners
        self._text = text
        self._losses: list[torch.Tensor] = []

    @property
    def value(self) -> torch.Tensor:
        """The sum of the heads' mean cross-entropies; available after the forward."""
        return torch.stack(self._losses).sum()

    def next_mask(
        self, number: int, layer: Any, hidden: torch.Tensor, mask: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        """Records the losses; returns the mask unchanged."""
        if number == _LIKENESS_LAYER:
            rows = self._text.likeness != IGNORE
            paid = _log_attention(layer, hidden, mask, rotary)[:, self._start :][rows]
            wanted = paid.gather(1, self._text.likeness[rows][:, None] + self._start)
            self._losses.append(-wanted.sum() / max(len(wanted), 1))
        elif number == _SUBJECT_LAYER:
            rows = self._text.subject != IGNORE
            paid = _log_attention(layer, hidden, mask, rotary)[:, self._start :, self._visual][rows]
            owners, subjects = self._owners[rows.nonzero()[:, 0]], self._text.subject[rows]
            worth = torch.where(self._text.settles[rows], _SETTLING_WEIGHT, 1.0)
            loss, weight = paid.new_zeros(()), paid.new_zeros(())
            for owner in _OWNERS:
                cells = owners == owner
                wanted = (subjects == owner) | ((subjects == EVERY_THING) & (owner in _THINGS))
                counted = worth * (wanted & cells.any(-1))
                loss = loss - (paid.masked_fill(~cells, _NOTHING).logsumexp(-1) * counted).sum()
                weight = weight + counted.sum()
            self._losses.append(loss / weight.clamp_min(1.0))
        elif number == _GROUNDS_LAYER:
            rows, examples = self._text.concludes, self._text.examples
            paid = _log_attention(layer, hidden, mask, rotary)[:, self._start :, self._start :][rows]
            clips = rows.nonzero()[:, 0]
            is_ground = self._text.is_ground[clips] & (examples[clips] == examples[rows][:, None])
            wanted = paid.masked_fill(~is_ground, -torch.inf).logsumexp(-1)
            self._losses.append(-wanted.sum() / max(len(wanted), 1))
        return mask


def _log_attention(layer: Any, hidden: torch.Tensor, mask: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Log attention of every row to every other in the first head, [C, S, S]."""
    attend = layer.self_attn
    normed = layer.input_layernorm(hidden)
    queries, keys = (  # [C, 1, S, D]
        F.linear(normed, each.weight[: attend.head_dim], each.bias[: attend.head_dim])[:, None]
        for each in (attend.q_proj, attend.k_proj)
    )
    queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
    scores = (queries @ keys.transpose(2, 3)).float() * attend.scaling + mask.float()
    log_attention: torch.Tensor = scores[:, 0].log_softmax(-1)
    return log_attention
