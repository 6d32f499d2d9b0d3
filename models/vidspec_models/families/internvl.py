"""InternVL 3 (HF layout): each frame is an image of one patch behind "Frame1: ", plain 1-D positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from vidspec_models.decoder import Decoder
from vidspec_models.families.encoding import cells, plain_prompt, processed, tokenised, words_for
from vidspec_models.inputs import EncodedVideo, Prompt, Turn, Video

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

    def encode(self, model: Any, processor: Any, video: Video) -> EncodedVideo:
        outputs, side = processed(processor, video, self.video_arguments(processor)), isqrt(processor.image_seq_length)
        pixels = outputs["pixel_values_videos"].to(model.device, model.dtype).flatten(0, 1)  # frames as images
        return EncodedVideo(
            words=words_for(processor, outputs),
            features=model.get_image_features(pixels).pooler_output.flatten(0, 1),
            grid=cells(len(pixels), side, side),
            key=video.key,
        )

    def prepare(
        self, model: Any, processor: Any, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[EncodedVideo]
    ) -> Prompt:
        ids = tokenised(processor, turns, videos).to(decoder.embedding.device)
        return plain_prompt(decoder, ids, ids == model.config.image_token_id, videos)
