"""A prompt with some of its video rows left out, every row that stays keeping its rotary position."""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import compress

import torch
from torch import Tensor

from vidspec_models.inputs import NO_CELL, Prompt

from .strategies import Strategy, kept_rows


@torch.inference_mode()
def kept_of_prompt(
    strategy: Strategy, ratio: float, prompt: Prompt, relevance: Tensor | None = None, seed: int = 0
) -> Tensor:
    """`kept_rows` of a prompt's own video rows; relevance [V] or None."""
    features = prompt.embeddings[prompt.is_video]
    return kept_rows(strategy, ratio, features, prompt.grid, relevance, seed)


@torch.inference_mode()
def pruned(prompt: Prompt, kept: Tensor) -> Prompt:
    """The prompt with only the video rows `kept` (sorted indices into its video rows) and all of its text.

    Positions stay as they were, so the answer starts where it would have (`next_position`); with nothing left out
    it is the prompt itself.
    """
    if len(kept) == prompt.num_video_tokens:
        return prompt
    stays = ~prompt.is_video
    stays[prompt.is_video.nonzero()[:, 0][kept]] = True
    rows = stays.nonzero()[:, 0]
    cos, sin = prompt.rotary
    return replace(
        prompt,
        ids=tuple(compress(prompt.ids, stays.tolist())),
        embeddings=prompt.embeddings[rows],
        rotary=(cos[rows], sin[rows]),
        is_video=prompt.is_video[rows],
        grid=None if prompt.grid is None else prompt.grid[kept],
        layer_additions=None if prompt.layer_additions is None else prompt.layer_additions[:, rows],
        identity=None,
    )


def cell_rows(prompt: Prompt) -> Tensor:
    """Indices into the prompt's video rows, int64 [C], of those that are cells of a frame."""
    if prompt.grid is None:
        return torch.arange(prompt.num_video_tokens, device=prompt.is_video.device)
    return (prompt.grid != NO_CELL).all(1).nonzero()[:, 0]


def grid_checksum(prompt: Prompt) -> int:
    """Equal for two prompts whose cells are the same places in the same order, whatever their models."""
    if prompt.grid is None:
        return prompt.num_video_tokens
    cells = prompt.grid[cell_rows(prompt)].to(torch.int32).cpu().contiguous()
    return zlib.crc32(cells.numpy().tobytes())
