"""LLaVA-OneVision, LLaVA-NeXT-Video: every frame is a square of cells, positions are plain 1-D ones."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.families.base import Family, cells, processed
from vidspec_models.inputs import NO_CELL
from vidspec_models.request import Video

_FRAMES_AT_ONCE = 8  # through the processor and the tower


class SquareFrames(Family):
    """What they share with InternVL: the processor brings frames to one size, the tower takes them one by one."""

    @abstractmethod
    def side(self, model: Any, processor: Any) -> int:
        """Rows and columns of a frame's cells."""

    def features(self, model: Any, pixels: Tensor) -> Tensor:
        """Projected rows [1, all rows, hidden size] or [frames, rows, hidden size] of pixels [1, frames, 3, H, W]."""
        features: Tensor = model.get_video_features(pixels).pooler_output
        return features

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        return len(video.frames) * self.side(model, processor) ** 2

    def encode(self, model: Any, processor: Any, video: Video) -> EncodedVideo:
        """A few frames at a time: pixels and the tower's memory do not grow with the video."""
        side, arguments = self.side(model, processor), self.video_arguments(processor)
        features = []
        for first in range(0, len(video.frames), _FRAMES_AT_ONCE):
            outputs = processed(processor, _frames_from(video, first), arguments)
            pixels = outputs["pixel_values_videos"].to(model.device, model.dtype)
            features.append(self.features(model, pixels).flatten(0, 1))
        # Of all of its pixels only the shape counts for what stands for the video in the text.
        all_pixels = pixels.new_zeros(()).expand(1, len(video.frames), *pixels.shape[2:])
        return EncodedVideo(
            words=processor.replace_video_token({**outputs, "pixel_values_videos": all_pixels}, video_idx=0),
            features=torch.cat(features),
            grid=cells(len(video.frames), side, side),
            key=video.key,
        )


def _frames_from(video: Video, first: int) -> Video:
    chosen = slice(first, first + _FRAMES_AT_ONCE)
    return replace(video, frames=video.frames[chosen], source_indices=video.source_indices[chosen])


class LlavaOnevision(SquareFrames):
    """`LlavaOnevisionForConditionalGeneration` with its Qwen2 decoder: one newline token behind each video."""

    num_frames = 32  # what the released checkpoints were trained on

    def side(self, model: Any, processor: Any) -> int:
        vision = model.config.vision_config
        side: int = -(-(vision.image_size // vision.patch_size) // 2)
        return side

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        return super().num_video_tokens(model, processor, video) + 1

    def features(self, model: Any, pixels: Tensor) -> Tensor:
        return super().features(model, pixels)[:, :-1]  # without the newline

    def encode(self, model: Any, processor: Any, video: Video) -> EncodedVideo:
        encoded = super().encode(model, processor, video)
        return replace(
            encoded,
            features=torch.cat((encoded.features, model.model.image_newline[None].to(encoded.features.dtype))),
            grid=torch.cat((encoded.grid, torch.full((1, 3), NO_CELL))),
        )


class LlavaNextVideo(SquareFrames):
    """`LlavaNextVideoForConditionalGeneration` with its Llama (Vicuna, Yi) or Mistral decoder."""

    num_frames = 8  # 144 tokens each; the released 7B has a context of 4096

    def side(self, model: Any, processor: Any) -> int:
        vision = model.config.vision_config
        side: int = vision.image_size // vision.patch_size // model.config.spatial_pool_stride
        return side
