"""LLaVA-NeXT-Video: pooled CLIP features, nothing between frames, plain 1-D positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vidspec_models.decoder import Decoder
from vidspec_models.families.encoding import cells, encode, plain_prompt
from vidspec_models.inputs import Prompt, Turn, Video

_NUM_FRAMES = 8  # 144 tokens each; the released 7B has a context of 4096


class LlavaNextVideo:
    """`LlavaNextVideoForConditionalGeneration` with its Llama (Vicuna, Yi) or Mistral decoder."""

    def language_model(self, model: Any) -> Any:
        return model.model.language_model

    def default_num_frames(self, processor: Any) -> int:
        return int(processor.video_processor.num_frames or _NUM_FRAMES)

    def video_arguments(self, processor: Any) -> Mapping[str, Any]:
        return {}

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        return len(video.frames) * _side(model) ** 2

    def prepare(
        self, model: Any, processor: Any, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[Video]
    ) -> Prompt:
        ids, processed = encode(processor, turns, videos, self.video_arguments(processor))
        decoder.require_room(len(ids))
        ids = ids.to(decoder.embedding.device)
        features, grid, num_frames = [], [], 0
        for outputs in processed:
            pixels = outputs["pixel_values_videos"].to(ids.device, model.dtype)  # [1, frames, 3, height, width]
            features.append(model.get_video_features(pixels).pooler_output.flatten(0, 1))
            grid.append(cells(num_frames, pixels.shape[1], _side(model), _side(model)))
            num_frames += pixels.shape[1]
        return plain_prompt(decoder, ids, ids == model.config.video_token_id, features, grid)


def _side(model: Any) -> int:
    """Rows and columns of a frame's pooled cells."""
    vision = model.config.vision_config
    side: int = vision.image_size // vision.patch_size // model.config.spatial_pool_stride
    return side
