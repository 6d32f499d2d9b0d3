"""LLaVA-OneVision: pooled SigLIP features and one newline token per video, plain 1-D positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vidspec_models.decoder import Decoder
from vidspec_models.inputs import Prompt, Turn, Video

_RELEASED_NUM_FRAMES = 32  # what the released checkpoints were trained on


class LlavaOnevision:
    """`LlavaOnevisionForConditionalGeneration`, its processor and its Qwen2 decoder."""

    def language_model(self, model: Any) -> Any:
        return model.model.language_model

    def default_num_frames(self, processor: Any) -> int:
        return int(processor.video_processor.num_frames or _RELEASED_NUM_FRAMES)

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        vision = model.config.vision_config
        side: int = -(-(vision.image_size // vision.patch_size) // 2)
        return len(video.frames) * side * side + 1

    def prepare(
        self, model: Any, processor: Any, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[Video]
    ) -> Prompt:
        text = processor.apply_chat_template(conversation(turns), add_generation_prompt=True, tokenize=False)
        inputs = processor(
            text=text,
            videos=[video.frames for video in videos] or None,
            video_metadata=[metadata(video) for video in videos] or None,
            do_sample_frames=False,
            return_tensors="pt",
        )
        ids = inputs["input_ids"][0].to(decoder.embedding.device)
        rotary = decoder.prompt_rotary(len(ids))
        is_video = ids == model.config.video_token_id
        embeddings = decoder.embedding[ids]
        if videos:
            embeddings[is_video] = self._features(model, inputs["pixel_values_videos"], len(videos), is_video)
        return Prompt(
            ids=tuple(ids.tolist()),
            embeddings=embeddings,
            rotary=rotary,
            is_video=is_video,
            next_position=len(ids),
        )

    def _features(self, model: Any, pixels: Any, num_videos: int, is_video: torch.Tensor) -> torch.Tensor:
        """Projected features of all videos in prompt order, [rows, hidden size]."""
        rows: list[torch.Tensor] = []
        for index in range(num_videos):  # one by one: clips may differ in their number of frames
            clip = pixels[index][None].to(is_video.device, model.dtype)
            rows.append(model.get_video_features(clip).pooler_output.flatten(0, 1))
        return torch.cat(rows)


def conversation(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns in the structure that transformers' chat templates read: media first, then text."""
    return [
        {
            "role": turn.role,
            "content": [{"type": "video"}] * turn.num_videos + [{"type": "text", "text": turn.text}],
        }
        for turn in turns
    ]


def metadata(video: Video) -> dict[str, Any]:
    """The source's true facts; processors that stamp times must not guess them from the sampled frames."""
    return {
        "total_num_frames": video.source_num_frames,
        "fps": video.source_fps,
        "duration": video.duration_s,
        "frames_indices": list(video.source_indices),
        "height": video.frames.shape[1],
        "width": video.frames.shape[2],
    }
