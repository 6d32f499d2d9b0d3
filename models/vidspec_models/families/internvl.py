"""InternVL 3 (HF layout): each frame is an image of one patch behind "Frame1: ", plain 1-D positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from vidspec_models.decoder import Decoder
from vidspec_models.families.encoding import cells, encode, plain_prompt
from vidspec_models.inputs import Prompt, Turn, Video

_NUM_FRAMES = 32
_FRAME_MARKS = 2  # <img> and </img>; the words before them are counted once they are tokenised


class InternVL:
    """`InternVLForConditionalGeneration` with its Qwen2, Qwen3 or Llama decoder."""

    def language_model(self, model: Any) -> Any:
        return model.model.language_model

    def default_num_frames(self, processor: Any) -> int:
        return int(processor.video_processor.num_frames or _NUM_FRAMES)

    def video_arguments(self, processor: Any) -> Mapping[str, Any]:
        return {}

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        return len(video.frames) * (int(processor.image_seq_length) + _FRAME_MARKS)

    def prepare(
        self, model: Any, processor: Any, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[Video]
    ) -> Prompt:
        ids, processed = encode(processor, turns, videos, self.video_arguments(processor))
        decoder.require_room(len(ids))
        ids = ids.to(decoder.embedding.device)
        features, grid, num_frames = [], [], 0
        side = isqrt(processor.image_seq_length)
        for outputs in processed:
            pixels = outputs["pixel_values_videos"].to(ids.device, model.dtype).flatten(0, 1)  # frames as images
            features.append(model.get_image_features(pixels).pooler_output.flatten(0, 1))
            grid.append(cells(num_frames, len(pixels), side, side))
            num_frames += len(pixels)
        return plain_prompt(decoder, ids, ids == model.config.image_token_id, features, grid)
