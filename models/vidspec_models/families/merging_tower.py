"""A vision tower that merges frames between layers (EarlyTom): hooks on transformers' modules, with any kernels.

The tower's output again has rows for every frame, with those of a merged frame repeated, so that later code need not
know what was merged. The choice of tokens is returned separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from vidspec_models.compression.early_tom import choose, likenesses, merge_frames, merging_layers, precise, segments

_LAYERS = (SiglipEncoderLayer, CLIPEncoderLayer)


def read_layers(model: Any) -> list[nn.Module]:
    """The layers of a model's tower up to the one whose output is read; none if their type is not known here."""
    found = [module for module in model.model.vision_tower.modules() if isinstance(module, _LAYERS)]
    read = model.config.vision_feature_layer
    if not isinstance(read, int):
        return []
    return found[: read if read >= 0 else len(found) + 1 + read]


class MergedFrames:
    """What happened to a tower's frames: which merged frame stands for each, and the attention that rows received."""

    def __init__(self, num_frames: int) -> None:
        self._stands_for = list(range(num_frames))
        self._rows = torch.empty(0)
        self._attention = torch.empty(0)

    @property
    def num_computed(self) -> int:
        """Frames that went through the tower's last layer."""
        return self._stands_for[-1] + 1

    def merge(self, rows: Tensor) -> Tensor:
        """Called between two layers with rows [F, P, W]; returns rows of fewer frames."""
        merged, stands_for = merge_frames(rows)
        self._stands_for = [stands_for[number] for number in self._stands_for]
        self._rows = merged
        return merged

    def attend(self, layer: Any, rows: Tensor) -> None:
        """Note the attention that each of the rows [N, P, W] receives in a layer, 1 on average."""
        attention = layer.self_attn
        queries, keys = (
            functional.linear(precise(layer.layer_norm1(rows)), precise(linear.weight), precise(linear.bias))
            .unflatten(-1, (attention.num_heads, -1))
            .transpose(1, 2)
            for linear in (attention.q_proj, attention.k_proj)
        )
        paid = [  # a frame at a time: P * P numbers for each head
            (mine @ theirs.transpose(1, 2) * attention.scale).softmax(-1).mean((0, 1))
            for mine, theirs in zip(queries, keys, strict=True)
        ]
        self._attention = torch.stack(paid) * rows.shape[1]

    def expanded(self, rows: Tensor) -> Tensor:
        """Expand the computed rows [N, P, W] to all frames [F, P, W]."""
        return rows[self._stands_for]

    def chosen(self, ratio: float, side: int) -> Tensor:
        """Which cells stay, bool [F * side * side]: a share `ratio` of all, or every merged cell if that is fewer."""
        width = isqrt(self._attention.shape[1])
        patches = self._attention[:, -width * width :].unflatten(1, (width, width))  # without a class token
        cells = functional.adaptive_avg_pool2d(patches[:, None], side).flatten(1)
        num_frames = len(self._stands_for)
        kept = torch.zeros(num_frames, side * side, dtype=torch.bool, device=cells.device)
        first = [self._stands_for.index(number) for number in range(self.num_computed)]
        stretches = segments(likenesses(self._rows))
        kept[first] = choose(cells, stretches, ratio * num_frames / self.num_computed)
        return kept.flatten()


@contextmanager
def merging(model: Any, num_frames: int) -> Iterator[MergedFrames]:
    """Inside, the model's tower, called with `num_frames` frames, merges frames that repeat each other."""
    frames, layers = MergedFrames(num_frames), read_layers(model)
    with ExitStack() as hooks:
        for number in merging_layers(len(layers)):
            hook = layers[number].register_forward_hook(lambda _, _given, rows: frames.merge(rows))
            hooks.callback(hook.remove)
        hook = layers[-1].register_forward_pre_hook(lambda layer, given: frames.attend(layer, given[0]))
        hooks.callback(hook.remove)
        projector = model.model.multi_modal_projector
        # Must run before other hooks that read the projector's input, such as those of `Family.record_tower`.
        hook = projector.register_forward_pre_hook(lambda _, given: (frames.expanded(given[0]),), prepend=True)
        hooks.callback(hook.remove)
        yield frames
