"""The stage *harden*: the target alone learns to read compressed videos, distilled from itself seeing all tokens.

Large models read a fact from several redundant tokens. This target was trained on whole clips and reads a fact from
particular tokens, so it loses the fact with them. Here tokens are merged and hidden as in the service: the selection is
the service's own (`compression`), only the bookkeeping differs. In the service, rows come one by one and are kept in a
cache; here all rows of a packed sequence are present at once, and hiding is a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from vidspec_models.bundled.scene import NUM_SLOTS
from vidspec_models.compression import REFRESH_TOKENS
from vidspec_models.compression.dycoke import hidden_by, num_left, still_stands, temporal_token_merging
from vidspec_models.training.architecture import CELLS, NUM_VISUAL
from vidspec_models.training.examples import ClipBatch, choose_tokens, draw_num_frames, draw_num_visual, make_clip_batch
from vidspec_models.training.forward import (
    BLOCKED,
    Layout,
    Rotary,
    answer_accuracy,
    answer_loss,
    distillation_loss,
    in_bfloat16,
    make_layout,
)
from vidspec_models.training.language_stage import LanguageStage, Phase
from vidspec_models.training.options import TrainOptions
from vidspec_models.training.stage_run import unhardened_target

_TRUTH_WEIGHT = 2.0
_NEGLECT_WEIGHT = 0.3
_MERGED_SHARE = 0.35
_THIN_SHARE, _FEW_TOKENS = 0.3, 128  # share of 8-frame clips with few tokens, of which more than half show content
_MERGE_RATIOS = (0.3, 0.4, 0.5, 0.5, 0.5, 0.6, 0.7)
_SERVED_LAYER = 3
_MARGIN = 0.3  # in log attention


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The part of a clip that the target sees; by default all tokens of 8 frames."""

    num_frames: int = NUM_SLOTS
    merge_ratio: float = 0.0  # K
    hide_ratio: float = 0.0  # P
    layer: int = _SERVED_LAYER  # L
    most_tokens: int | None = None  # keeps at most this many of the remaining tokens: content first, then random ones
    is_noisy: bool = True  # frames and features are noisy as in the other stages; else as rendered


def draw_view(generator: torch.Generator) -> View:
    """A random view. A third merge tokens and most of these also hide some, near the served settings; half have more
    than 8 frames."""
    merge, hide, share, shift, thin = torch.rand(5, generator=generator).tolist()
    number = int(torch.randint(len(_MERGE_RATIOS), (1,), generator=generator))
    num_frames = draw_num_frames(generator)
    merges = merge < _MERGED_SHARE
    hides = hide < (0.7 if merges else 0.1)
    most: int | None
    if num_frames > NUM_SLOTS:
        most = draw_num_visual(num_frames, generator)
    else:
        most = None if merges or hides or thin >= _THIN_SHARE else _FEW_TOKENS
    return View(
        num_frames=num_frames,
        merge_ratio=_MERGE_RATIOS[number] if merges else 0.0,
        hide_ratio=0.5 + 0.3 * share if hides else 0.0,
        layer=_SERVED_LAYER + int(torch.randint(-1, 2, (1,), generator=generator) if shift < 0.3 else 0),
        most_tokens=most,
        is_noisy=bool(torch.rand(1, generator=generator) < 0.35),
    )


class HardenStage(LanguageStage):
    """Each unit of a few clips has one view; the teacher is the target as it was when the stage began."""

    name = "harden"
    phases = (Phase(0.0, 12, NUM_VISUAL, 208),)
    first_clip = 60_000_000
    learning_rates = (4e-4, 2e-4)
    decay_from = 0.3
    pair_share = 0.5  # of the units of 8 frames; at 0.15, the target soon forgot how to answer about two clips

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options)
        taught = unhardened_target(options.work_dir)
        self._teacher = self.load_learner("target", taught).requires_grad_(False)
        self.target = self.load_learner("target", taught)
        self.target.story_head.requires_grad_(False)
        self.trained = {"target": self.target}

    def loss(self, clips: range, phase: Phase, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        view = draw_view(generator)
        batch = make_clip_batch(
            self.packer, self.options.seed, clips, phase.text_len, greedy_text=True, num_frames=view.num_frames
        ).to(self.device)
        with in_bfloat16(self.device):
            features = self.tower(batch.frames, generator, is_noisy=view.is_noisy)
            wanted = self._taught(batch, features, view, generator)
            logits, neglect = self.seen(batch, features, view, generator)
        logits = logits.float()
        divergence = distillation_loss(logits, wanted, batch.text)
        truth = answer_loss(logits, batch.text)
        figures = {"kl": float(divergence.detach()), "neglect": float(neglect.detach())}
        seen = "dycoke" if view.hide_ratio else "ttm" if view.merge_ratio else "none"
        figures |= answer_accuracy(wanted, batch.text, "t_")
        figures |= answer_accuracy(logits, batch.text, f"{seen}{view.num_frames}_")
        loss = divergence + _TRUTH_WEIGHT * truth + _NEGLECT_WEIGHT * neglect
        if view.num_frames == NUM_SLOTS and (pairs := self.pair_text(clips, generator)) is not None:
            keep = choose_tokens(batch.content.cpu(), _FEW_TOKENS, generator).to(self.device)
            with in_bfloat16(self.device):
                paired = self.forward.side_by_side(self.target, features, keep, pairs).float()
            loss = loss + answer_loss(paired, pairs)
            figures |= {"pair": answer_accuracy(paired, pairs)["qa"]}
        return loss, figures

    @torch.no_grad()
    def _taught(self, batch: ClipBatch, features: torch.Tensor, view: View, generator: torch.Generator) -> torch.Tensor:
        """The teacher's logits; of longer clips, it sees only 8 frames, a number that it may handle best."""
        stride = view.num_frames // NUM_SLOTS
        phase = int(torch.randint(stride, (1,), generator=generator))
        shown = features.unflatten(0, (len(batch.content), -1))[:, phase::stride].flatten(0, 1)
        keep = torch.arange(NUM_VISUAL, device=features.device).expand(len(batch.content), -1)
        return self.forward(self._teacher, shown, keep, batch.text)[0].float()

    def seen(
        self, batch: ClipBatch, features: torch.Tensor, view: View, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the target on the view, and the loss of `DyCokeMask.neglect`."""
        num_cells = view.num_frames * CELLS
        everything = torch.arange(num_cells, device=features.device).expand(len(batch.content), -1)
        tokens = self.target.project(features, everything)
        keep = _merged(tokens, view.merge_ratio) if view.merge_ratio else everything
        if view.most_tokens is not None:
            content = batch.content.gather(1, keep)
            keep = keep.gather(1, choose_tokens(content.cpu(), view.most_tokens, generator).to(keep.device))
        layout = make_layout(keep, num_cells, batch.text)
        tokens = tokens.gather(1, keep[:, :, None].expand(-1, -1, tokens.shape[2]))
        if not view.hide_ratio:
            return self.forward.run(self.target, layout, tokens)[0], tokens.new_zeros(())
        num_seen = num_left(layout.num_visual, view.hide_ratio)
        mask = DyCokeMask(layout, batch.text.is_caption, batch.worth.gather(1, keep), view.layer, num_seen)
        logits, _ = self.forward.run(self.target, layout, tokens, next_mask=mask.next_mask)
        return logits, mask.neglect_loss


def _merged(tokens: torch.Tensor, merge_ratio: float) -> torch.Tensor:
    """Numbers [C, K] of the tokens that merging leaves, ascending, for projected tokens [C, T * 64, H]."""
    frames = tokens.detach().unflatten(1, (-1, CELLS))
    return torch.stack([temporal_token_merging(clip, merge_ratio).flatten().nonzero()[:, 0] for clip in frames])


class DyCokeMask:
    """DyCoke's second stage within a packed batch: rows that the service would decode have visual columns hidden.

    Only captions are long enough to have such rows; the first word of an answer is predicted from the complete prompt.
    """

    def __init__(self, layout: Layout, is_caption: torch.Tensor, worth: torch.Tensor, layer: int, num_seen: int):
        """`is_caption` [C, L] marks the rows that predict the caption; `worth` [C, K] is the value of each token;
        `num_seen` tokens stay visible."""
        self.neglect_loss = worth.new_zeros(())
        self._layer = layer
        self._layout = layout
        self._num_hidden = max(layout.num_visual - max(1, num_seen), 0)
        self._worth = worth
        start = layout.text.start
        first = is_caption.int().argmax(1) + 1
        count = is_caption.sum(1)
        periods = max(1, -(-int(count.max()) // REFRESH_TOKENS))  # foreign clips have no long answer
        size = layout.segments.shape[1]
        row = torch.arange(size, device=is_caption.device) - start - first[:, None]  # 0: the answer's first token
        self._period = torch.where((row >= 0) & (row < count[:, None]), row // REFRESH_TOKENS, -1)  # [C, S]
        opening = REFRESH_TOKENS * torch.arange(periods, device=is_caption.device)
        self._is_opened = opening < count[:, None]
        self._openers = (start + first[:, None] + opening).clamp_max(size - 1)  # [C, R]

    def next_mask(
        self, number: int, layer: Any, hidden: torch.Tensor, mask: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        """After the chosen layer, close the mask; also records the loss of `neglect`."""
        if number != self._layer:
            return mask
        attention = self.attention(layer, hidden, mask, rotary)
        self.neglect_loss = self.neglect(attention)
        return self.close(mask, attention)

    def attention(self, layer: Any, hidden: torch.Tensor, mask: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Attention of each period's first row to each visual token in this layer, mean over heads: [C, R, K]."""
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
        """The mask [C, 1, S, S] with the columns blocked that each row's period hides."""
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
        """How far valuable tokens are below the visibility threshold in log attention; the choice has no gradient."""
        if self._num_hidden == 0:
            return attention.new_zeros(())
        wanted = self._worth[:, None] * self._is_opened[:, :, None]
        logs = attention.clamp_min(1e-9).log()
        bound = attention.detach().kthvalue(self._num_hidden, dim=2, keepdim=True).values.clamp_min(1e-9).log()
        return (F.relu(bound + _MARGIN - logs) * wanted).sum() / wanted.sum().clamp_min(1)


def _heads(rows: torch.Tensor, size: int) -> torch.Tensor:
    heads: torch.Tensor = rows.unflatten(-1, (-1, size)).transpose(1, 2)
    return heads
