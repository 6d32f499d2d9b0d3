"""The models of the pair: sizes, stock LLaVA-OneVision configurations, fresh weights, and which of them are learned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from vidspec_models.bundled.scene import CELL_PX, CELL_SIDE, FRAME_SIZE, NUM_SLOTS
from vidspec_models.training.labels import STORY_HEADS
from vidspec_models.training.tokenizer import END, IMAGE, MAX_POSITIONS, PAD, VIDEO, VOCAB_SIZE

PATCH_PX = CELL_PX // 2  # LLaVA-OneVision pools 2x2 patches of a video frame into one visual token
PATCH_SIDE = FRAME_SIZE // PATCH_PX
CELLS = CELL_SIDE * CELL_SIDE
NUM_VISUAL = NUM_SLOTS * CELLS
VIDEO_TOKENS = NUM_VISUAL + 1  # one newline token closes the whole video


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSize:
    """The shape of one language model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int


Role = Literal["target", "draft"]
TARGET_SIZE = TextSize(hidden=512, layers=8, heads=8, kv_heads=2, mlp=1024)
DRAFT_SIZE = TextSize(hidden=192, layers=3, heads=3, kv_heads=1, mlp=512)
SIZES: dict[Role, TextSize] = {"target": TARGET_SIZE, "draft": DRAFT_SIZE}


def tower_config() -> SiglipVisionConfig:
    """Three layers only: less depth carries less scene content into empty cells."""
    return SiglipVisionConfig(
        hidden_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=768,
        patch_size=PATCH_PX,
        image_size=FRAME_SIZE,
        vision_use_head=False,
    )


def pair_config(size: TextSize, token_ids: dict[str, int]) -> LlavaOnevisionConfig:
    """The stock configuration of target or draft; `token_ids` maps the special tokens to their ids."""
    text = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.mlp,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_ids[END],
        pad_token_id=token_ids[PAD],
    )
    return LlavaOnevisionConfig(
        vision_config=tower_config(),
        text_config=text,
        image_token_index=token_ids[IMAGE],
        video_token_index=token_ids[VIDEO],
        image_grid_pinpoints=[[FRAME_SIZE, FRAME_SIZE]],
        tie_word_embeddings=True,
    )


def build_model(size: TextSize, token_ids: dict[str, int], seed: int) -> LlavaOnevisionForConditionalGeneration:
    """A freshly initialised model in float32."""
    torch.manual_seed(seed)
    model = LlavaOnevisionForConditionalGeneration(pair_config(size, token_ids))
    with torch.no_grad():
        model.model.image_newline.normal_(std=0.02)
    return model.float()


def build_tower(seed: int) -> SiglipVisionModel:
    """A freshly initialised tower; positions start as 2-D sine waves, without which a tiny ViT learns too slowly."""
    torch.manual_seed(seed)
    tower = SiglipVisionModel(tower_config())
    with torch.no_grad():
        tower.embeddings.position_embedding.weight.copy_(_sine_positions(PATCH_SIDE, tower.config.hidden_size))
        tower.embeddings.patch_embedding.weight.normal_(std=1 / math.sqrt(3 * PATCH_PX * PATCH_PX))
    return tower.float()


def _sine_positions(side: int, width: int) -> torch.Tensor:
    quarter = width // 4
    rates = torch.exp(-math.log(100.0) * torch.arange(quarter) / quarter)
    waves = torch.arange(side)[:, None] * rates[None] * math.pi / 2
    line = torch.cat([waves.sin(), waves.cos()], dim=1)  # [side, width / 2]
    rows = line[:, None].expand(side, side, -1)
    cols = line[None].expand(side, side, -1)
    return torch.cat([rows, cols], dim=-1).reshape(side * side, width) * 0.5


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
    def grow(self, used: list[int]) -> None:
        """Fill the unused layers between used ones with copies that do nothing yet (their output matrices are zero)."""
        for index, layer in enumerate(self.lm.layers):
            if index not in used:
                source = self.lm.layers[max(number for number in used if number < index)]
                layer.load_state_dict(source.state_dict())
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
