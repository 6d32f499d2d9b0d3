"""LLaVA-NeXT-Video: pooled CLIP features, nothing between frames, plain 1-D positions."""

from __future__ import annotations

from typing import Any

from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.families.base import Family, cells, processed, words_for
from vidspec_models.request import Video


class LlavaNextVideo(Family):
    """`LlavaNextVideoForConditionalGeneration` with its Llama (Vicuna, Yi) or Mistral decoder."""

    num_frames = 8  # 144 tokens each; the released 7B has a context of 4096

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        return len(video.frames) * _side(model) ** 2

    def encode(self, model: Any, processor: Any, video: Video) -> EncodedVideo:
        outputs, side = processed(processor, video, self.video_arguments(processor)), _side(model)
        pixels = outputs["pixel_values_videos"].to(model.device, model.dtype)  # [1, frames, 3, height, width]
        return EncodedVideo(
            words=words_for(processor, outputs),
            features=model.get_video_features(pixels).pooler_output.flatten(0, 1),
            grid=cells(pixels.shape[1], side, side),
            key=video.key,
        )


def _side(model: Any) -> int:
    """Rows and columns of a frame's pooled cells."""
    vision = model.config.vision_config
    side: int = vision.image_size // vision.patch_size // model.config.spatial_pool_stride
    return side
