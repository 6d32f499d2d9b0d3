"""The training forward of both language models: packed sequences, chosen visual tokens, own masks and positions.

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

from .architecture import CELL_SIDE
from .labels import STORY_HEADS

BLOCKED = -1e9


class Learner(nn.Module):
    """The trainable part of one model (projector, newline, language model) and its story heads."""

    def __init__(self, model: LlavaOnevisionForConditionalGeneration) -> None:
        super().__init__()
        self.projector = model.model.multi_modal_projector
        self.newline = model.model.image_newline
        self.lm = model.model.language_model
        width = model.config.text_config.hidden_size
        self.story_head = nn.ModuleDict({name: nn.Linear(width, count) for name, count in STORY_HEADS.items()})

    def project(self, features: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Visual tokens [C, K, H] for patch features [C * T, 256, W] and kept token numbers [C, K].

        As LLaVA-OneVision does it, with its 2x2 mean moved before the last linear layer, which commutes.
        """
        grid = features.view(-1, CELL_SIDE, 2, CELL_SIDE, 2, features.shape[-1]).transpose(2, 3)
        cells = grid.reshape(keep.shape[0], -1, 4, features.shape[-1])  # [C, T * 64, 4, W]
        chosen = cells.gather(1, keep[:, :, None, None].expand(-1, -1, 4, cells.shape[-1]))
        hidden = self.projector.act(self.projector.linear_1(chosen)).mean(dim=2)
        tokens: torch.Tensor = self.projector.linear_2(hidden)
        return tokens

    def story_logits(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: head(hidden) for name, head in self.story_head.items()}


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
        return Layout(
            prefix_ids=self.prefix_ids,
            num_visual=self.num_visual,
            ids=self.ids[clips],
            positions=self.positions[clips],
            segments=self.segments[clips],
        )


def make_layout(
    prefix_ids: torch.Tensor, keep: torch.Tensor, num_cells: int, text: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> Layout:
    """`keep` [C, K] are the visual tokens present; `text` is (ids, positions, segments), each [C, L]."""
    ids, positions, segments = text
    count, prefix = keep.shape[0], len(prefix_ids)
    head = torch.arange(prefix, device=keep.device).expand(count, -1)
    newline = torch.full((count, 1), prefix + num_cells, device=keep.device)
    return Layout(
        prefix_ids=prefix_ids,
        num_visual=keep.shape[1],
        ids=ids,
        positions=torch.cat([head, prefix + keep, newline, positions], dim=1),
        segments=F.pad(segments, (prefix + keep.shape[1] + 1, 0)),
    )


def block_mask(layout: Layout, visible: torch.Tensor) -> torch.Tensor:
    """Additive mask [C, 1, S, S]: causal, a turn sees the video and itself; `visible` [C, K] drops visual columns."""
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


def apply_layer(
    layer: nn.Module, hidden: torch.Tensor, mask: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """One decoder layer; the unit of compilation."""
    output: torch.Tensor = layer(hidden, attention_mask=mask, position_embeddings=rotary)
    return output


def run_layers(
    apply: Callable[..., torch.Tensor], lm: Any, layers: list[nn.Module], embeds: torch.Tensor,
    mask: torch.Tensor, positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Hidden states after half of the layers and after all of them (normalised)."""
    rotary = lm.rotary_emb(embeds, positions)
    hidden = middle = embeds
    for index, layer in enumerate(layers):
        hidden = apply(layer, hidden, mask, rotary)
        if index + 1 == (len(layers) + 1) // 2:
            middle = hidden
    return middle, lm.norm(hidden)


def text_logits(learner: Learner, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Logits [C, L, V] of the text part, from the tied embedding."""
    return F.linear(hidden[:, layout.text], learner.lm.embed_tokens.weight)


def calibrate_projector(learner: Learner, features: torch.Tensor) -> None:
    """Scale the fresh projector to the tower's features: unit inputs to the activation, small visual tokens."""
    with torch.no_grad():
        flat = features.flatten(0, 1)
        mean, spread = flat.mean(0), flat.std()
        first, second = learner.projector.linear_1, learner.projector.linear_2
        first.weight.normal_(std=float(1 / (spread * flat.shape[1] ** 0.5)))
        first.bias.copy_(-first.weight @ mean)
        second.weight.normal_(std=0.15 / second.in_features**0.5)
        second.bias.zero_()


def grow_layers(layers: Any, used: list[int]) -> None:
    """Fill the unused layers between used ones with copies that do nothing yet (their output matrices are zero)."""
    with torch.no_grad():
        for index, layer in enumerate(layers):
            if index not in used:
                source = layers[max(number for number in used if number < index)]
                layer.load_state_dict(source.state_dict())
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
