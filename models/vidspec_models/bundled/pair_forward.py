"""What the stages of the language models share: the finished tower, a learner new or saved, the forward of either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from transformers import LlavaOnevisionForConditionalGeneration, SiglipVisionModel

from vidspec_models.processor import multiplies_bfloat16

from .architecture import CELLS, TextSize, build_model, build_tower
from .attention import register
from .attributes import NUM_SLOTS
from .augment import NoiseBank, augment, normalise
from .clip_batch import ClipBatch
from .lm_forward import Layout, Learner, apply_layer, block_mask, embed, make_layout, run_layers, text_logits
from .options import Stage, TrainOptions
from .stage_run import load_part
from .tower_stage import tower_features
from .turns import TurnPacker

NUM_VISUAL = NUM_SLOTS * CELLS
FEATURE_NOISE = 0.1  # of the features' spread: what survives only as a faint trace must not be learned


class FrozenTower:
    """Features of frames, noisy ones of augmented frames unless told otherwise; built from the finished tower stage."""

    def __init__(self, options: TrainOptions) -> None:
        self.tower = build_tower(options.seed).to(options.device).eval().requires_grad_(False)
        self.tower.load_state_dict(load_part(options.work_dir, "tower", "tower"))
        self.tower.set_attn_implementation(register())
        self._bank = NoiseBank(options.device)
        self._run: Callable[[SiglipVisionModel, torch.Tensor], torch.Tensor] = (
            torch.compile(tower_features) if options.compile_models else tower_features
        )

    @torch.no_grad()
    def __call__(self, frames: torch.Tensor, generator: torch.Generator, *, is_noisy: bool = True) -> torch.Tensor:
        device = next(self.tower.parameters()).device
        if not is_noisy:
            return self._run(self.tower, normalise(frames.to(device)))
        features = self._run(self.tower, augment(frames.to(device), generator, self._bank))
        noise = self._bank.like(features, generator)
        return features.addcmul_(noise, features.std(dim=(0, 1)), value=FEATURE_NOISE)


def build_learner(
    size: TextSize, token_ids: dict[str, int], seed: int
) -> tuple[LlavaOnevisionForConditionalGeneration, Learner]:
    """A fresh model whose language part attends by plain products, and its trainable view."""
    model = build_model(size, token_ids, seed)
    model.model.language_model.set_attn_implementation(register())
    return model, Learner(model)


def load_learner(
    size: TextSize, part: Literal["target", "draft"], token_ids: dict[str, int], options: TrainOptions,
    stage: Stage = "joint",
) -> tuple[Learner, list[nn.Module]]:  # fmt: skip
    """A learner out of a stage's checkpoint, and the layers it uses."""
    _, learner = build_learner(size, token_ids, options.seed)
    learner.load_state_dict(load_part(options.work_dir, stage, part))
    used = load_part(options.work_dir, "joint", "growth")["used"] if part == "target" else range(size.layers)
    return learner.to(options.device), [learner.lm.layers[index] for index in used]


def in_bfloat16(device: torch.device) -> torch.autocast:
    """Products in bfloat16 where that is fast, as such a machine serves the pair; weights stay as they are."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" or multiplies_bfloat16())


class PairForward:
    """Runs both learners on a batch; each number of layers and length is compiled once."""

    def __init__(self, packer: TurnPacker, options: TrainOptions) -> None:
        self.packer = packer
        self.prefix = torch.tensor(packer.prefix, device=options.device)
        # One layer is compiled, not the stack: its graph serves every layer, and a new shape costs seconds.
        self.layer: Callable[..., Any] = torch.compile(apply_layer) if options.compile_models else apply_layer

    def layout(self, batch: ClipBatch, keep: torch.Tensor) -> Layout:
        return make_layout(self.prefix, keep, NUM_VISUAL, (batch.ids, batch.positions, batch.segments))

    def __call__(
        self, learner: Learner, layers: list[nn.Module], features: torch.Tensor, keep: torch.Tensor,
        layout: Layout, visible: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        """Text logits [C, L, V] and story logits at the visual tokens."""
        embeds = embed(learner, layout, learner.project(features, keep))
        mask = block_mask(layout, visible)
        middle, hidden = run_layers(self.layer, learner.lm, layers, embeds, mask, layout.positions)
        return text_logits(learner, hidden, layout), learner.story_logits(middle[:, layout.visual])
