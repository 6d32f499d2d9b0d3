"""A recipe to the VideoLM that the engine drives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vidspec_models.decoder import Decoder
from vidspec_models.placement import LayerSpan, layer_spans
from vidspec_models.synthetic.family import RandomFamily
from vidspec_models.synthetic.oracle import OracleDraft
from vidspec_models.synthetic.recipe import Recipe
from vidspec_models.synthetic.weights import random_language_model
from vidspec_models.video_lm import StepLogits, VideoLM

Fuse = Callable[[Any, Any, Any, Sequence[LayerSpan]], tuple[Decoder, StepLogits | None]]


def load_random(recipe: Recipe, devices: Sequence[torch.device], dtype: torch.dtype, fuse: Fuse) -> VideoLM:
    """The engine's model: the target with its own logits, the draft with its oracle's choice if it has one.

    All of it is made on the first device, as its peer is, and spread from there. `fuse` makes decoder and step of a
    language model, its head, its config and its layers' places, as for any checkpoint.
    """
    family = RandomFamily(recipe)
    model = random_language_model(recipe.shape, recipe.seed, devices[0], dtype)
    spans = layer_spans(model, model.model, model.lm_head, devices)
    with torch.inference_mode():
        decoder, step = fuse(model.model, model.lm_head, model.config, spans)
    model.model.layers, model.lm_head = nn.ModuleList(), nn.Identity()
    if recipe.oracle is not None:
        return OracleDraft(model, family, decoder, recipe, recipe.oracle, step)
    return VideoLM(model, None, family, decoder, frozenset(), step)
