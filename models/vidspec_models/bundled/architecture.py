"""Sizes and stock configurations of the pair: one LLaVA-OneVision architecture, two language models, one tower."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from .attributes import FRAME_SIZE, NUM_SLOTS
from .tokenizer import END, IMAGE, PAD, VIDEO, VOCAB_SIZE

PATCH_PX = 8
PATCH_SIDE = FRAME_SIZE // PATCH_PX
CELL_SIDE = PATCH_SIDE // 2  # LLaVA-OneVision pools 2x2 patches of a video frame into one visual token
CELLS = CELL_SIDE * CELL_SIDE
VIDEO_TOKENS = NUM_SLOTS * CELLS + 1  # one newline token closes the whole video
MAX_POSITIONS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSize:
    """The shape of one language model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int


TARGET_SIZE = TextSize(hidden=512, layers=8, heads=8, kv_heads=2, mlp=1024)
DRAFT_SIZE = TextSize(hidden=192, layers=3, heads=3, kv_heads=1, mlp=512)


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
    embeddings = tower_embeddings(tower)
    with torch.no_grad():
        embeddings.position_embedding.weight.copy_(_sine_positions(PATCH_SIDE, 192))
        embeddings.patch_embedding.weight.normal_(std=1 / math.sqrt(3 * PATCH_PX * PATCH_PX))
    return tower.float()


def tower_embeddings(tower: Any) -> Any:
    """The embedding module, wherever the installed transformers keeps it."""
    inner = getattr(tower, "vision_model", tower)
    return inner.embeddings


def _sine_positions(side: int, width: int) -> torch.Tensor:
    quarter = width // 4
    rates = torch.exp(-math.log(100.0) * torch.arange(quarter) / quarter)
    waves = torch.arange(side)[:, None] * rates[None] * math.pi / 2
    line = torch.cat([waves.sin(), waves.cos()], dim=1)  # [side, width / 2]
    rows = line[:, None].expand(side, side, -1)
    cols = line[None].expand(side, side, -1)
    return torch.cat([rows, cols], dim=-1).reshape(side * side, width) * 0.5
