"""One vision tower for two models: where target and draft have the same, one of them runs it.

A draft that was distilled from its target often keeps its tower. What the tower makes of a video is handed on as the
projector is given it, since projectors end in language models of different sizes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Of a configuration: which of the tower's layers is read, and how many of its rows are left before the projector.
_READ = ("vision_feature_", "spatial_pool_", "downsample_ratio")
_OF_A_COPY = {"dtype", "_name_or_path", "transformers_version"}  # facts about files, not about what is computed


@torch.inference_mode()
def tower_digest(tower: nn.Module, config: Any, processor: Any) -> str:
    """Of a tower's weights, of what is read of it, and of how frames become its pixels."""
    told = config.to_dict()
    facts = {name: value for name, value in told.items() if name.startswith(_READ)}
    vision = {name: value for name, value in told["vision_config"].items() if name not in _OF_A_COPY}
    pixels = {name: value for name, value in processor.video_processor.to_dict().items() if name not in _OF_A_COPY}
    digest = hashlib.blake2b(json.dumps([facts, vision, pixels], sort_keys=True, default=str).encode())
    for name, weights in sorted(tower.state_dict().items()):
        digest.update(f"{name} {weights.dtype} {tuple(weights.shape)}".encode())
        digest.update(weights.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def heard(projector: nn.Module) -> Iterator[list[Tensor]]:
    """What the projector is given meanwhile, in order; on the CPU, so that a device's memory does not fill with it."""
    given: list[Tensor] = []
    hook = projector.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0].float().cpu()))
    try:
        yield given
    finally:
        hook.remove()
