"""What a compressed target sees of a training sample: which visual tokens are merged away, which are hidden, from whom.

Selection is the service's own (`compression`); only its bookkeeping differs: there rows come one by one and lie in a
cache, here all rows of a packed sequence are there at once and the rest is a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from vidspec_models.compression.dycoke import REFRESH_TOKENS
from vidspec_models.compression.merging import merge_frames
from vidspec_models.compression.selection import hidden_by, still_stands

from .architecture import CELLS
from .attributes import NUM_SLOTS
from .lm_forward import BLOCKED, Layout

_MERGE_RATIOS = (0.3, 0.4, 0.5, 0.5, 0.5, 0.6, 0.7)
_SERVED_LAYER = 3
_THIN = 320  # visual tokens of a clip of 16 frames, mostly: all would cost three times as much
_MARGIN = 0.3  # in log attention


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One way of seeing a clip; the default is all of it at 8 frames."""

    num_frames: int = NUM_SLOTS
    merge_ratio: float = 0.0  # K
    hide_ratio: float = 0.0  # P
    layer: int = _SERVED_LAYER  # L
    most_tokens: int | None = None  # what is left of the rest by chance, content first
    is_noisy: bool = True  # frames and features as in the other stages, or as rendered


def draw_view(generator: torch.Generator, long_share: float) -> View:
    """Mostly merged, mostly hidden, around what is served; `long_share` of the views have 16 frames."""
    chance: list[float] = torch.rand(6, generator=generator).tolist()
    is_long = chance[0] < long_share
    merges = chance[1] < 0.7
    hides = chance[2] < (0.7 if merges else 0.3)
    number = int(torch.randint(len(_MERGE_RATIOS), (1,), generator=generator))
    most = None
    if is_long and chance[5] < 0.8:
        most = _THIN
    elif not merges and not hides and chance[5] < 0.5:
        most = NUM_SLOTS * 16
    return View(
        num_frames=2 * NUM_SLOTS if is_long else NUM_SLOTS,
        merge_ratio=_MERGE_RATIOS[number] if merges else 0.0,
        hide_ratio=0.5 + 0.3 * chance[3] if hides else 0.0,
        layer=_SERVED_LAYER + int(torch.randint(-1, 2, (1,), generator=generator) if chance[4] < 0.3 else 0),
        most_tokens=most,
        is_noisy=bool(torch.rand(1, generator=generator) < 0.35),
    )


def merged_tokens(tokens: torch.Tensor, merge_ratio: float) -> torch.Tensor:
    """Numbers [C, K] of the tokens that merging leaves, ascending, for projected tokens [C, T * 64, H]."""
    frames = tokens.detach().unflatten(1, (-1, CELLS))
    return torch.stack([merge_frames(clip, merge_ratio).flatten().nonzero()[:, 0] for clip in frames])


class Hiding:
    """DyCoke's second stage within one packed batch: rows of an answer that the service decodes lose visual columns.

    Only captions are long enough to have such rows; the first word of an answer is read off the complete prompt.
    """

    def __init__(self, layout: Layout, is_caption: torch.Tensor, worth: torch.Tensor, layer: int, num_seen: int):
        """`is_caption` [C, L] marks the rows that predict the caption, `worth` [C, K] what tokens show;
        `num_seen` tokens stay seen."""
        self.layer = layer
        self._layout = layout
        self._num_hidden = max(layout.num_visual - max(1, num_seen), 0)
        self._worth = worth
        start = layout.text.start
        first = is_caption.int().argmax(1) + 1
        count = is_caption.sum(1)
        periods = -(-int(count.max()) // REFRESH_TOKENS)
        size = layout.segments.shape[1]
        row = torch.arange(size, device=is_caption.device) - start - first[:, None]  # 0: the answer's first token
        self._period = torch.where((row >= 0) & (row < count[:, None]), row // REFRESH_TOKENS, -1)  # [C, S]
        opening = REFRESH_TOKENS * torch.arange(periods, device=is_caption.device)
        self._is_opened = opening < count[:, None]
        self._openers = (start + first[:, None] + opening).clamp_max(size - 1)  # [C, R]

    def attention(
        self, layer: Any, hidden: torch.Tensor, mask: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """What the opening rows pay to each visual token in this layer, mean over heads: [C, R, K]."""
        attend = layer.self_attn
        normed = layer.input_layernorm(hidden)
        at = self._openers[:, :, None]
        rows = normed.gather(1, at.expand(-1, -1, normed.shape[2]))
        cos, sin = rotary
        queries = _heads(attend.q_proj(rows), attend.head_dim)
        keys = _heads(attend.k_proj(normed), attend.head_dim)
        row_cos, row_sin = (wave.gather(1, at.expand(-1, -1, wave.shape[2])) for wave in (cos, sin))
        queries, _ = apply_rotary_pos_emb(queries, queries, row_cos, row_sin)
        keys, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
        keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
        scores = (queries @ keys.transpose(2, 3)).float() * attend.scaling
        scores = scores + mask.gather(2, at[:, None].expand(-1, -1, -1, mask.shape[3]))
        paid: torch.Tensor = scores.softmax(-1).mean(1)[:, :, self._layout.visual]
        return paid

    def close(self, mask: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """The mask [C, 1, S, S] without what each row's period hides."""
        columns = torch.zeros(*attention.shape[:2], mask.shape[3], dtype=torch.bool, device=mask.device)
        visual = columns[:, :, self._layout.visual]
        for clip, rows in enumerate(attention.detach()):
            standing = rows[0]
            for period, row in enumerate(rows):
                if period == 0 or not still_stands(row, standing):
                    standing = row
                visual[clip, period, hidden_by(standing, self._num_hidden)] = True
        closed = columns.gather(1, self._period.clamp_min(0)[:, :, None].expand(-1, -1, columns.shape[2]))
        return mask.masked_fill((closed & (self._period >= 0)[:, :, None])[:, None], BLOCKED)

    def neglect(self, attention: torch.Tensor) -> torch.Tensor:
        """How far tokens of worth lie below what is just seen, in log attention: the choice itself has no gradient."""
        if self._num_hidden == 0:
            return attention.new_zeros(())
        wanted = self._worth[:, None] * self._is_opened[:, :, None]
        logs = attention.clamp_min(1e-9).log()
        bound = attention.detach().kthvalue(self._num_hidden, dim=2, keepdim=True).values.clamp_min(1e-9).log()
        return (F.relu(bound + _MARGIN - logs) * wanted).sum() / wanted.sum().clamp_min(1)


def _heads(rows: torch.Tensor, size: int) -> torch.Tensor:
    heads: torch.Tensor = rows.unflatten(-1, (-1, size)).transpose(1, 2)
    return heads
