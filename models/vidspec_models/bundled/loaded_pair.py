"""A trained model opened for evaluation: stock `from_pretrained`, plus the packed forward that shares one video."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForImageTextToText, AutoProcessor

from .architecture import CELLS
from .attention import register
from .attributes import NUM_SLOTS
from .lm_forward import Layout, Learner, apply_layer, block_mask, embed, make_layout, run_layers, text_logits
from .render import render, slot_times
from .scene import Scene
from .tower_stage import tower_features
from .turns import TurnPacker

NUM_VISUAL = NUM_SLOTS * CELLS


class LoadedModel:
    """One model of the pair on one device; all its answers come from stock modules."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.packer = TurnPacker(self.processor.tokenizer)
        self._dtype = dtype
        self._device = device
        self._prefix = torch.tensor(self.packer.prefix, device=device)

    def pixels(self, scenes: list[Scene]) -> torch.Tensor:
        """Processed canonical frames [C, 8, 3, 128, 128]."""
        return self.pixels_of([render(scene, slot_times()) for scene in scenes])

    def pixels_of(self, clips: list[NDArray[np.uint8]]) -> torch.Tensor:
        """Processed frames of clips [T, H, W, 3]."""
        videos = [torch.from_numpy(frames).permute(0, 3, 1, 2) for frames in clips]
        batch = self.processor.video_processor(videos=videos, return_tensors="pt", do_sample_frames=False)
        pixels: torch.Tensor = batch["pixel_values_videos"]
        return pixels.to(self._device, self._dtype)

    @torch.no_grad()
    def generate(self, pixels: torch.Tensor, prompt: str, max_new_tokens: int = 160) -> list[list[int]]:
        """Greedy answers of stock `generate`, as token ids with the end token."""
        video = self.processor.tokenizer.convert_tokens_to_ids("<video>")
        tokens = pixels.shape[1] * CELLS + 1
        ids = [*self.packer.prefix, *[video] * tokens, *self.packer.prompt_ids(prompt)]
        inputs = torch.tensor([ids] * len(pixels), device=self._device)
        mask = torch.ones_like(inputs)
        output = self.model.generate(
            input_ids=inputs, attention_mask=mask, pixel_values_videos=pixels,
            do_sample=False, max_new_tokens=max_new_tokens,
        )  # fmt: skip
        end = self.model.generation_config.eos_token_id
        end = end[0] if isinstance(end, list) else end
        answers = [row[len(ids) :].tolist() for row in output]
        return [row[: row.index(end) + 1] if end in row else row for row in answers]

    @torch.no_grad()
    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """Tower features of all frames [C * T, 256, W]."""
        return tower_features(self.model.model.vision_tower, pixels.flatten(0, 1))

    @torch.no_grad()
    def packed_logits(
        self, features: torch.Tensor, text: tuple[torch.Tensor, torch.Tensor, torch.Tensor], visible: torch.Tensor
    ) -> torch.Tensor:
        """Logits [C, L, V] of packed turns (ids, positions, segments) with some visual tokens [C, 512] masked."""
        learner = Learner(self.model).to(self._device)
        learner.lm.set_attn_implementation(register())
        keep = torch.arange(NUM_VISUAL, device=self._device).expand(len(visible), -1)
        layout: Layout = make_layout(self._prefix, keep, NUM_VISUAL, text)
        embeds = embed(learner, layout, learner.project(features, keep))
        mask = block_mask(layout, visible).to(embeds.dtype)
        _, hidden = run_layers(apply_layer, learner.lm, list(learner.lm.layers), embeds, mask, layout.positions)
        learner.lm.set_attn_implementation("sdpa")
        return text_logits(learner, hidden, layout).float()
