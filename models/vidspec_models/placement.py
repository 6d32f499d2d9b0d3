"""Which device holds which of a model's layers: consecutive ones, shared out by the bytes of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vidspec_models.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Consecutive layers on one device."""

    device: torch.device
    layers: range


def layer_spans(
    model: Any, language_model: Any, lm_head: Any, devices: Sequence[torch.device]
) -> tuple[LayerSpan, ...]:
    """A span for each device, in their order; a device named twice gets two.

    All that a prompt is made of (tower, projector, embedding) lies with the first layers, since rows start there; final
    norm and head lie with the last, where rows end up. Only at a span's end do rows move. Raises ModelLoadError for
    more devices than layers.
    """
    layers = language_model.layers
    if len(devices) > len(layers):
        raise ModelLoadError(f"{len(devices)} devices for a model of {len(layers)} layers: name at most {len(layers)}")
    is_tied = lm_head.weight is language_model.embed_tokens.weight
    behind = _num_bytes(language_model.norm) + _num_bytes(lm_head)
    before = _num_bytes(model) - _num_bytes(layers) - (_num_bytes(language_model.norm) if is_tied else behind)
    spans, start = [], 0
    for device, count in zip(
        devices, share(len(layers), _num_bytes(layers[0]), before, behind, len(devices)), strict=True
    ):
        spans.append(LayerSpan(device, range(start, start + count)))
        start += count
    return tuple(spans)


def share(num_layers: int, layer_bytes: int, before: int, behind: int, num_devices: int) -> list[int]:
    """Layers of each device, one at least, such that the largest share of bytes is as small as can be.

    `before` bytes lie with the first, `behind` with the last. Layers are all alike, so it is enough to give each to
    the device that has least.
    """
    counts, held = [1] * num_devices, [layer_bytes] * num_devices
    held[0] += before
    held[-1] += behind
    for _ in range(num_layers - num_devices):
        least = held.index(min(held))
        counts[least] += 1
        held[least] += layer_bytes
    return counts


def move(model: Any, language_model: Any, spans: Sequence[LayerSpan]) -> None:
    """The model to its device; of several, to the first, without what the decoder will fetch piece by piece.

    So no device ever holds more than its share, and a layer that is being fused.
    """
    if len(spans) == 1:
        model.to(spans[0].device)
        return
    layers, head = language_model.layers, model.lm_head
    language_model.layers, model.lm_head = nn.ModuleList(), nn.Identity()
    model.to(spans[0].device)
    language_model.layers, model.lm_head = layers, head


def _num_bytes(module: Any) -> int:
    """Weights of a module, each once."""
    return sum(parameter.nbytes for parameter in module.parameters())
