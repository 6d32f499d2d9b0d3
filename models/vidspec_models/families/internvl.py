"""InternVL 3: frames are squares of cells, too, but each frame is its own image between marks and words."""

from __future__ import annotations

from math import isqrt

from torch import Tensor

from vidspec_models.families.llava import SquareFrames
from vidspec_models.request import Video

_FRAME_MARKS = 2  # <img> and </img>; the words before them are only counted after tokenising


class InternVL(SquareFrames):
    """`InternVLForConditionalGeneration` (HF layout) with its Qwen2, Qwen3 or Llama decoder.

    Each frame is an image of one patch after the text "Frame1: ".
    """

    num_frames = 32
    placeholder = "image_token_id"

    @property
    def side(self) -> int:
        return isqrt(self.processor.image_seq_length)

    def features(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.model.get_image_features(pixels.flatten(0, 1)).pooler_output
        return features

    def num_video_tokens(self, video: Video) -> int:
        return super().num_video_tokens(video) + _FRAME_MARKS * len(video.frames)
