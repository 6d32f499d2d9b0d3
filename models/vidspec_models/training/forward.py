"""The training forward of both language models: packed examples, chosen visual tokens, own masks, losses on answers.

It runs transformers' own modules; only what surrounds them (splicing, masks, which layers are in use) is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlavaOnevisionForConditionalGeneration

from vidspec_models.bundled.scene import CELL_SIDE
from vidspec_models.decoder.placement import is_faster_in_bfloat16
from vidspec_models.training.architecture import CELLS, NUM_VISUAL, VIDEO_TOKENS
from vidspec_models.training.examples import IGNORE, STORY_HEADS, TEXT_ONLY, PackedText

BLOCKED = -1e9
Rotary = tuple[torch.Tensor, torch.Tensor]
# Called before each layer with its number, module, input, mask and rotary values; returns the mask for later layers.
NextMask = Callable[[int, Any, torch.Tensor, torch.Tensor, Rotary], torch.Tensor]


class Learner(nn.Module):
    """The trainable part of one model (projector, newline, language model) and its story heads."""

    def __init__(self, model: LlavaOnevisionForConditionalGeneration) -> None:
        super().__init__()
        self.projector = model.model.multi_modal_projector
        self.newline = model.model.image_newline
        self.lm = model.model.language_model
        self.used = list(range(len(self.lm.layers)))  # numbers of the layers in use; `grow` adds the others
        width = model.config.text_config.hidden_size
        self.story_head = nn.ModuleDict({name: nn.Linear(width, count) for name, count in STORY_HEADS.items()})

    @property
    def layers(self) -> list[nn.Module]:
        """The layers in use."""
        return [self.lm.layers[index] for index in self.used]

    def get_extra_state(self) -> list[int]:
        """The layers in use, which are part of the checkpoint."""
        return self.used

    def set_extra_state(self, state: list[int]) -> None:
        self.used = state

    def project(self, features: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Visual tokens [C, K, H] for patch features [C * T, 256, W] and kept token numbers [C, K].

        As in LLaVA-OneVision, but with the 2x2 mean before the last linear layer; the two commute.
        """
        grid = features.view(-1, CELL_SIDE, 2, CELL_SIDE, 2, features.shape[-1]).transpose(2, 3)
        cells = grid.reshape(keep.shape[0], -1, 4, features.shape[-1])  # [C, T * 64, 4, W]
        chosen = cells.gather(1, keep[:, :, None, None].expand(-1, -1, 4, cells.shape[-1]))
        hidden = self.projector.act(self.projector.linear_1(chosen)).mean(dim=2)
        tokens: torch.Tensor = self.projector.linear_2(hidden)
        return tokens

    def story_logits(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: head(hidden) for name, head in self.story_head.items()}

    @torch.no_grad()
    def calibrate_projector(self, features: torch.Tensor) -> None:
        """Scale the fresh projector to the tower's features: unit inputs to the activation, small visual tokens."""
        flat = features.flatten(0, 1)
        mean, spread = flat.mean(0), flat.std()
        first, second = self.projector.linear_1, self.projector.linear_2
        first.weight.normal_(std=float(1 / (spread * flat.shape[1] ** 0.5)))
        first.bias.copy_(-first.weight @ mean)
        second.weight.normal_(std=0.15 / second.in_features**0.5)
        second.bias.zero_()

    @torch.no_grad()
    def grow(self) -> None:
        """Use all layers; the new ones are copies that do nothing yet (their output matrices are zero)."""
        for index, layer in enumerate(self.lm.layers):
            if index not in self.used:
                source = self.lm.layers[max(number for number in self.used if number < index)]
                layer.load_state_dict(source.state_dict())
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        self.used = list(range(len(self.lm.layers)))


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a packed sequence: prefix, K visual tokens, newline, text."""

    prefix_ids: torch.Tensor  # [C, P]
    num_visual: int
    ids: torch.Tensor  # [C, L] text
    positions: torch.Tensor  # [C, P + K + 1 + L]
    segments: torch.Tensor  # [C, P + K + 1 + L], 0 for prefix and video

    @property
    def visual(self) -> slice:
        start = self.prefix_ids.shape[1]
        return slice(start, start + self.num_visual)

    @property
    def text(self) -> slice:
        return slice(self.prefix_ids.shape[1] + self.num_visual + 1, None)


def make_layout(keep: torch.Tensor, num_cells: int, text: PackedText) -> Layout:
    """`keep` [C, K]: numbers of the visual tokens that are present, out of `num_cells`; all come before the text."""
    count, prefix = text.prefix.shape
    start = torch.where(text.segments < TEXT_ONLY, prefix + num_cells + 1, 0)
    head = torch.arange(prefix, device=keep.device).expand(count, -1)
    newline = torch.full((count, 1), prefix + num_cells, device=keep.device)
    return Layout(
        prefix_ids=text.prefix,
        num_visual=keep.shape[1],
        ids=text.ids,
        positions=torch.cat([head, prefix + keep, newline, start + text.positions], dim=1),
        segments=F.pad(text.segments, (prefix + keep.shape[1] + 1, 0)),
    )


def block_mask(layout: Layout, visible: torch.Tensor | None = None) -> torch.Tensor:
    """Additive causal mask [C, 1, S, S]: an example sees the video (or its `visible` [C, K] tokens) and itself.

    Text-only examples see only themselves.
    """
    segments = layout.segments
    size = segments.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    shared = segments == 0
    column = torch.ones_like(shared)
    if visible is not None:
        column[:, layout.visual] = visible
    seen = shared[:, None] & (segments < TEXT_ONLY)[:, :, None]
    allowed = (seen | (segments[:, None] == segments[:, :, None])) & causal & column[:, None]
    allowed |= torch.eye(size, dtype=torch.bool, device=segments.device)
    return torch.where(allowed, 0.0, BLOCKED)[:, None]


def apply_layer(layer: nn.Module, hidden: torch.Tensor, mask: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """One decoder layer; the unit of compilation."""
    output: torch.Tensor = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    return output


class PackedForward:
    """Runs a learner on packed text after the visual tokens that are present."""

    def __init__(self, *, compile_layers: bool) -> None:
        if compile_layers:
            torch._dynamo.config.cache_size_limit = 64  # each number of clips and tokens needs its own graph
        # Compile one layer, not the stack: all layers share the graph, and a new shape costs only seconds.
        self.layer: Callable[..., Any] = torch.compile(apply_layer) if compile_layers else apply_layer

    def __call__(
        self, learner: Learner, features: torch.Tensor, keep: torch.Tensor, text: PackedText,
        visible: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Text logits [C, L, V], and the visual tokens' hidden states [C, K, H] after half of the layers.

        All tokens that are present are visible unless `visible` is given.
        """
        num_frames, rest = divmod(len(features), len(keep))
        assert not rest, "every clip has as many frames"
        layout = make_layout(keep, num_frames * CELLS, text)
        return self.run(learner, layout, learner.project(features, keep), visible)

    def side_by_side(
        self, learner: Learner, features: torch.Tensor, keep: torch.Tensor, text: PackedText
    ) -> torch.Tensor:  # fmt: skip
        """Text logits where each row shows its clip of 8 frames and then the next clip of the batch."""
        visual = learner.project(features, keep)
        newline = learner.newline.expand(len(keep), 1, -1)
        both = torch.cat([visual, newline, visual.roll(-1, 0)], dim=1)
        between = torch.full_like(keep[:, :1], NUM_VISUAL)
        places = torch.cat([keep, between, VIDEO_TOKENS + keep.roll(-1, 0)], dim=1)
        return self.run(learner, make_layout(places, NUM_VISUAL + VIDEO_TOKENS, text), both)[0]

    def run(
        self, learner: Learner, layout: Layout, visual: torch.Tensor, visible: torch.Tensor | None = None,
        next_mask: NextMask = lambda _number, _layer, _hidden, mask, _rotary: mask,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """As `__call__`, for projected visual tokens [C, K, H] in any layout; `next_mask` may change the mask."""
        count, table, layers = len(visual), learner.lm.embed_tokens, learner.layers
        prefix = table(layout.prefix_ids)
        embeds = torch.cat([prefix, visual, learner.newline.expand(count, 1, -1), table(layout.ids)], dim=1)
        mask = block_mask(layout, visible).to(embeds.dtype)
        rotary = learner.lm.rotary_emb(embeds, layout.positions)
        hidden = middle = embeds
        for number, layer in enumerate(layers, 1):
            before, mask = mask, next_mask(number, layer, hidden, mask, rotary)
            hidden = self.layer(layer, hidden, before, rotary)
            if number == (len(layers) + 1) // 2:
                middle = hidden
        # The output head is the embedding table.
        return F.linear(learner.lm.norm(hidden)[:, layout.text], table.weight), middle[:, layout.visual]


def in_bfloat16(device: torch.device) -> torch.autocast:
    """Matrix products in bfloat16 if that is fast, as such a machine serves the pair; weights keep their type."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" or is_faster_in_bfloat16())


def answer_loss(logits: torch.Tensor, text: PackedText) -> torch.Tensor:
    """Weighted cross-entropy; positions without an answer have weight 0."""
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
