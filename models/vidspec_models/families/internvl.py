"""InternVL 3 (HF layout): each frame is an image of one patch behind "Frame1: ", plain 1-D positions."""

from __future__ import annotations

from math import isqrt
from typing import Any

from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.families.base import Family, cells, processed, words_for
from vidspec_models.request import Video

_FRAME_MARKS = 2  # <img> and </img>; the words before them are counted once they are tokenised


class InternVL(Family):
    """`InternVLForConditionalGeneration` with its Qwen2, Qwen3 or Llama decoder."""

    num_frames = 32
    placeholder = "image_token_id"  # each frame is an image

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        return len(video.frames) * (int(processor.image_seq_length) + _FRAME_MARKS)

    def encode(self, model: Any, processor: Any, video: Video) -> EncodedVideo:
        outputs, side = processed(processor, video, self.video_arguments(processor)), isqrt(processor.image_seq_length)
        pixels = outputs["pixel_values_videos"].to(model.device, model.dtype).flatten(0, 1)  # frames as images
        return EncodedVideo(
            words=words_for(processor, outputs),
            features=model.get_image_features(pixels).pooler_output.flatten(0, 1),
            grid=cells(len(pixels), side, side),
            key=video.key,
        )
