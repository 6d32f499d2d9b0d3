"""The models of the pair: stock LLaVA-OneVision configurations, fresh weights, and the attention they train with."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.masking_utils import eager_mask

from vidspec_models.bundled.scene import CELL_PX, CELL_SIDE, FRAME_SIZE, NUM_SLOTS
from vidspec_models.training.tokenizer import END, IMAGE, MAX_POSITIONS, PAD, VIDEO, VOCAB_SIZE

PATCH_PX = CELL_PX // 2  # LLaVA-OneVision pools 2x2 patches of a video frame into one visual token
PATCH_SIDE = FRAME_SIZE // PATCH_PX
CELLS = CELL_SIDE * CELL_SIDE
FRAME_COUNTS = (NUM_SLOTS, 2 * NUM_SLOTS, 4 * NUM_SLOTS)  # possible numbers of frames of a clip
NUM_VISUAL = NUM_SLOTS * CELLS
VIDEO_TOKENS = NUM_VISUAL + 1  # one newline token closes the whole video
_ATTENTION = "vidspec_matmul"

Role = Literal["target", "draft"]
_SIZES = {  # of the language models, as Qwen2Config names them
    "target": {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
        "intermediate_size": 1024,
    },
    "draft": {
        "hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1,
        "intermediate_size": 512,
    },
}  # fmt: skip


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


def build_model(role: Role, token_ids: dict[str, int], seed: int) -> LlavaOnevisionForConditionalGeneration:
    """A freshly initialised model in float32 whose language model uses the attention for training.

    `token_ids` maps the special tokens to their ids.
    """
    text = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        **_SIZES[role],
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_ids[END],
        pad_token_id=token_ids[PAD],
    )
    config = LlavaOnevisionConfig(
        vision_config=tower_config(),
        text_config=text,
        image_token_index=token_ids[IMAGE],
        video_token_index=token_ids[VIDEO],
        image_grid_pinpoints=[[FRAME_SIZE, FRAME_SIZE]],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlavaOnevisionForConditionalGeneration(config)
    with torch.no_grad():
        model.model.image_newline.normal_(std=0.02)
    model.model.language_model.set_attn_implementation(register_attention())
    return model.float()


def build_tower(seed: int) -> SiglipVisionModel:
    """A freshly initialised tower; positions start as 2-D sine waves, without which a tiny ViT learns too slowly."""
    torch.manual_seed(seed)
    tower = SiglipVisionModel(tower_config())
    with torch.no_grad():
        tower.embeddings.position_embedding.weight.copy_(_sine_positions(PATCH_SIDE, tower.config.hidden_size))
        tower.embeddings.patch_embedding.weight.normal_(std=1 / math.sqrt(3 * PATCH_PX * PATCH_PX))
    tower.set_attn_implementation(register_attention())
    return tower.float()


def _sine_positions(side: int, width: int) -> torch.Tensor:
    quarter = width // 4
    rates = torch.exp(-math.log(100.0) * torch.arange(quarter) / quarter)
    waves = torch.arange(side)[:, None] * rates[None] * math.pi / 2
    line = torch.cat([waves.sin(), waves.cos()], dim=1)  # [side, width / 2]
    rows = line[:, None].expand(side, side, -1)
    cols = line[None].expand(side, side, -1)
    return torch.cat([rows, cols], dim=-1).reshape(side * side, width) * 0.5


def register_attention() -> str:
    """Register the attention for training with transformers; returns the name to pass as `attn_implementation`.

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
