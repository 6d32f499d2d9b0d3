"""LLaVA-OneVision: pooled SigLIP features and one newline token per video, plain 1-D positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vidspec_models.decoder import Decoder
from vidspec_models.families.encoding import cells, plain_prompt, processed, tokenised, words_for
from vidspec_models.inputs import NO_CELL, EncodedVideo, Prompt, Turn, Video

_RELEASED_NUM_FRAMES = 32  # what the released checkpoints were trained on


class LlavaOnevision:
    """`LlavaOnevisionForConditionalGeneration`, its processor and its Qwen2 decoder."""

    def language_model(self, model: Any) -> Any:
        return model.model.language_model

    def default_num_frames(self, processor: Any) -> int:
        return int(processor.video_processor.num_frames or _RELEASED_NUM_FRAMES)

    def video_arguments(self, processor: Any) -> Mapping[str, Any]:
        return {}

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

    def prepare(
        self, model: Any, processor: Any, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[EncodedVideo]
    ) -> Prompt:
        ids = tokenised(processor, turns, videos).to(decoder.embedding.device)
        return plain_prompt(decoder, ids, ids == model.config.video_token_id, videos)


def _side(model: Any) -> int:
    """Rows and columns of a frame's pooled cells."""
    vision = model.config.vision_config
    side: int = -(-(vision.image_size // vision.patch_size) // 2)
    return side
