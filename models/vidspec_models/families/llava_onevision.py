"""LLaVA-OneVision: pooled SigLIP features and one newline token per video, plain 1-D positions."""

from __future__ import annotations

from typing import Any

import torch

from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.families.base import Family, cells, processed, words_for
from vidspec_models.inputs import NO_CELL
from vidspec_models.request import Video


class LlavaOnevision(Family):
    """`LlavaOnevisionForConditionalGeneration`, its processor and its Qwen2 decoder."""

    num_frames = 32  # what the released checkpoints were trained on

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        return len(video.frames) * _side(model) ** 2 + 1

    def encode(self, model: Any, processor: Any, video: Video) -> EncodedVideo:
        outputs, side = processed(processor, video, self.video_arguments(processor)), _side(model)
        pixels = outputs["pixel_values_videos"].to(model.device, model.dtype)  # [1, frames, 3, height, width]
        return EncodedVideo(
            words=words_for(processor, outputs),
            features=model.get_video_features(pixels).pooler_output.flatten(0, 1),
            grid=torch.cat((cells(pixels.shape[1], side, side), torch.full((1, 3), NO_CELL))),  # the newline
            key=video.key,
        )


def _side(model: Any) -> int:
    """Rows and columns of a frame's pooled cells."""
    vision = model.config.vision_config
    side: int = -(-(vision.image_size // vision.patch_size) // 2)
    return side
