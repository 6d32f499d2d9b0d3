"""LLaVA-NeXT-Video: pooled CLIP features, nothing between frames, plain 1-D positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vidspec_models.decoder import Decoder
from vidspec_models.families.encoding import cells, plain_prompt, processed, tokenised, words_for
from vidspec_models.inputs import EncodedVideo, Prompt, Turn, Video

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

    def encode(self, model: Any, processor: Any, video: Video) -> EncodedVideo:
        outputs, side = processed(processor, video, self.video_arguments(processor)), _side(model)
        pixels = outputs["pixel_values_videos"].to(model.device, model.dtype)  # [1, frames, 3, height, width]
        return EncodedVideo(
            words=words_for(processor, outputs),
            features=model.get_video_features(pixels).pooler_output.flatten(0, 1),
            grid=cells(pixels.shape[1], side, side),
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
    side: int = vision.image_size // vision.patch_size // model.config.spatial_pool_stride
    return side
