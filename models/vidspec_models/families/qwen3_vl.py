"""Qwen3-VL: time stamps in the prompt's words, features also added behind the decoder's first layers (deepstack)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from vidspec_models.families.qwen_vl import Qwen2VL
from vidspec_models.inputs import EncodedVideo, Video

_PAIR_MARKS = 2  # the start and end of vision; the words of the time are counted once they are tokenised


class Qwen3VL(Qwen2VL):
    """`Qwen3VLForConditionalGeneration` (dense)."""

    def video_arguments(self, processor: Any) -> Mapping[str, Any]:
        return {"cap_pixels_per_frame": True}  # as qwen-vl-utils; without it a few frames take a whole video's tokens

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        video = _at_least_a_pair(video)
        pairs = -(-len(video.frames) // int(processor.video_processor.temporal_patch_size))
        return super().num_video_tokens(model, processor, video) + _PAIR_MARKS * pairs

    def encode(self, model: Any, processor: Any, video: Video) -> EncodedVideo:
        return super().encode(model, processor, _at_least_a_pair(video))

    def _additions(self, encoded: Any) -> tuple[Tensor, ...]:
        return tuple(videos[0] for videos in encoded.deepstack_features)


def _at_least_a_pair(video: Video) -> Video:
    """A single frame twice, which is what odd numbers of frames become anyway; the processor refuses one."""
    if len(video.frames) > 1:
        return video
    return replace(video, frames=np.repeat(video.frames, 2, axis=0), source_indices=video.source_indices * 2)
