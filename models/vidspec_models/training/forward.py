"""The training forward of both language models: packed examples, chosen visual tokens, own masks, losses on answers.

It runs transformers' own modules; only what surrounds them (splicing, masks, which layers are in use) is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, LlavaOnevisionForConditionalGeneration
from transformers.masking_utils import eager_mask

from vidspec_models.decoder.placement import multiplies_bfloat16
from vidspec_models.training.architecture import NUM_VISUAL, Learner, TextSize, build_model
from vidspec_models.training.examples import PackedText
from vidspec_models.training.labels import IGNORE

BLOCKED = -1e9
_ATTENTION = "vidspec_matmul"
Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which position of a packed sequence is what: prefix, K visual tokens, newline, text."""

    prefix_ids: torch.Tensor  # [P]
    num_visual: int
    ids: torch.Tensor  # [C, L] text
    positions: torch.Tensor  # [C, P + K + 1 + L]
    segments: torch.Tensor  # [C, P + K + 1 + L], 0 for prefix and video

    @property
    def visual(self) -> slice:
        start = len(self.prefix_ids)
        return slice(start, start + self.num_visual)

    @property
    def text(self) -> slice:
        return slice(len(self.prefix_ids) + self.num_visual + 1, None)

    def part(self, clips: slice) -> Layout:
        """The same for some of the clips."""
        return replace(self, ids=self.ids[clips], positions=self.positions[clips], segments=self.segments[clips])


def make_layout(prefix_ids: torch.Tensor, keep: torch.Tensor, num_cells: int, text: PackedText) -> Layout:
    """`keep` [C, K] are the numbers of the visual tokens present, out of `num_cells`."""
    count, prefix = keep.shape[0], len(prefix_ids)
    head = torch.arange(prefix, device=keep.device).expand(count, -1)
    newline = torch.full((count, 1), prefix + num_cells, device=keep.device)
    return Layout(
        prefix_ids=prefix_ids,
        num_visual=keep.shape[1],
        ids=text.ids,
        positions=torch.cat([head, prefix + keep, newline, text.positions], dim=1),
        segments=F.pad(text.segments, (prefix + keep.shape[1] + 1, 0)),
    )


def block_mask(layout: Layout, visible: torch.Tensor) -> torch.Tensor:
    """Additive mask [C, 1, S, S]: causal, an example sees the video and itself; `visible` [C, K] columns only."""
    segments = layout.segments
    size = segments.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    shared = segments == 0
    column = torch.ones_like(shared)
    column[:, layout.visual] = visible
    allowed = (shared[:, None] | (segments[:, None] == segments[:, :, None])) & causal & column[:, None]
    allowed |= torch.eye(size, dtype=torch.bool, device=segments.device)
    return torch.where(allowed, 0.0, BLOCKED)[:, None]


def embed(learner: Learner, layout: Layout, visual: torch.Tensor) -> torch.Tensor:
    """Input embeddings [C, S, H]."""
    count = visual.shape[0]
    table = learner.lm.embed_tokens
    prefix = table(layout.prefix_ids).expand(count, -1, -1)
    newline = learner.newline.expand(count, 1, -1)
    return torch.cat([prefix, visual, newline, table(layout.ids)], dim=1)


def text_logits(learner: Learner, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Logits [C, L, V] of the text part, from the tied embedding."""
    return F.linear(hidden[:, layout.text], learner.lm.embed_tokens.weight)


def apply_layer(layer: nn.Module, hidden: torch.Tensor, mask: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """One decoder layer; the unit of compilation."""
    output: torch.Tensor = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    return output


class PackedForward:
    """Runs a learner on packed text behind the visual tokens that are present."""

    def __init__(self, prefix: list[int], device: str, *, compile_layers: bool) -> None:
        self.prefix = torch.tensor(prefix, device=device)
        if compile_layers:
            torch._dynamo.config.cache_size_limit = 64  # every number of clips and tokens is a graph of its own
        # One layer is compiled, not the stack: its graph serves every layer, and a new shape costs seconds.
        self.layer: Callable[..., Any] = torch.compile(apply_layer) if compile_layers else apply_layer

    def layout(self, text: PackedText, keep: torch.Tensor) -> Layout:
        """For clips of 8 frames."""
        return make_layout(self.prefix, keep, NUM_VISUAL, text)

    def __call__(
        self, learner: Learner, layers: list[nn.Module], features: torch.Tensor, keep: torch.Tensor,
        layout: Layout, visible: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Text logits [C, L, V], and the visual tokens' hidden states [C, K, H] after half of the layers."""
        embeds = embed(learner, layout, learner.project(features, keep))
        mask = block_mask(layout, visible).to(embeds.dtype)
        rotary = learner.lm.rotary_emb(embeds, layout.positions)
        hidden = middle = embeds
        for index, layer in enumerate(layers):
            hidden = self.layer(layer, hidden, mask, rotary)
            if index + 1 == (len(layers) + 1) // 2:
                middle = hidden
        return text_logits(learner, learner.lm.norm(hidden), layout), middle[:, layout.visual]


def build_learner(
    size: TextSize, token_ids: dict[str, int], seed: int
) -> tuple[LlavaOnevisionForConditionalGeneration, Learner]:
    """A fresh model whose language part attends by plain products, and its trainable part."""
    model = build_model(size, token_ids, seed)
    model.model.language_model.set_attn_implementation(register_attention())
    return model, Learner(model)


def in_bfloat16(device: torch.device) -> torch.autocast:
    """Products in bfloat16 where that is fast, as such a machine serves the pair; weights stay as they are."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" or multiplies_bfloat16())


def answer_loss(logits: torch.Tensor, text: PackedText) -> torch.Tensor:
    """Weighted cross-entropy; positions without an answer weigh nothing."""
    losses = F.cross_entropy(logits.flatten(0, 1), text.labels.clamp_min(0).flatten(), reduction="none")
    weights = text.weights.flatten()
    return (losses * weights).sum() / weights.sum()


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor, text: PackedText) -> torch.Tensor:
    """Weighted KL(teacher || student) of their logits."""
    log_teacher = teacher.detach().log_softmax(-1)
    divergence = (log_teacher.exp() * (log_teacher - student.log_softmax(-1))).sum(-1)
    return (divergence * text.weights).sum() / text.weights.sum()


@torch.no_grad()
def answer_accuracy(logits: torch.Tensor, text: PackedText, prefix: str = "") -> dict[str, float]:
    """Teacher-forced accuracy: all caption tokens, the fact words in captions, the words of short answers."""
    right = (logits.argmax(-1) == text.labels).float()
    answer = text.labels != IGNORE
    parts = {
        "caption": answer & text.is_caption,
        "facts": text.is_caption & (text.weights > 1.5),
        "qa": answer & ~text.is_caption & (text.weights > 1.5),
    }
    return {prefix + name: float(right[part].mean()) for name, part in parts.items()}


def register_attention() -> str:
    """Make the attention for training known to transformers; returns the name to pass as `attn_implementation`.

    Torch's fused attention has a slow backward on CPUs; this one compiles well.
    """
    AttentionInterface.register(_ATTENTION, _matmul_attention)
    AttentionMaskInterface.register(_ATTENTION, eager_mask)
    return _ATTENTION


def _matmul_attention(
    module: nn.Module,
    query: torch.Tensor,  # [B, H, Q, D]
    key: torch.Tensor,  # [B, G, K, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # additive [B, 1, Q, K]
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * (scaling or query.shape[-1] ** -0.5)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None
