"""Qwen2-VL and Qwen2.5-VL: frames at their own resolution, merged in pairs, positions of three axes (M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vidspec_models.decoder import Decoder
from vidspec_models.errors import ContextOverflow
from vidspec_models.families.encoding import cells, encode, merged
from vidspec_models.inputs import Prompt, Turn, Video

_NUM_FRAMES = 32
_FRAME_TOKENS = 768  # the cap of qwen-vl-utils; without video settings the cap would be the far larger one of images


class Qwen2VL:
    """`Qwen2VLForConditionalGeneration`: one temporal position per pair of frames."""

    def language_model(self, model: Any) -> Any:
        return model.model.language_model

    def default_num_frames(self, processor: Any) -> int:
        return int(processor.video_processor.num_frames or _NUM_FRAMES)

    def video_arguments(self, processor: Any) -> Mapping[str, Any]:
        ours = processor.video_processor
        most = min(ours.size["longest_edge"], _FRAME_TOKENS * (ours.patch_size * ours.merge_size) ** 2)
        size = {"shortest_edge": min(ours.size["shortest_edge"], most), "longest_edge": most}
        return {"size": size, "cap_pixels_per_frame": False}

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        ours = processor.video_processor
        patches: int = ours.get_num_of_video_patches(*video.frames.shape[:3], self.video_arguments(processor))
        return patches // int(ours.merge_size) ** 2

    def prepare(
        self, model: Any, processor: Any, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[Video]
    ) -> Prompt:
        ids, processed = encode(processor, turns, videos, self.video_arguments(processor))
        is_video = ids == model.config.video_token_id
        grids = torch.cat([outputs["video_grid_thw"] for outputs in processed]) if videos else None
        positions, _ = model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=2 * is_video.int()[None] if videos else torch.zeros_like(ids)[None],
            video_grid_thw=grids,
            **self._times(processor, videos),
        )  # asked for every request; the positions that the module keeps are another request's
        next_position = int(positions.max()) + 1
        decoder.require_room(len(ids))
        if next_position >= decoder.context_length:
            raise ContextOverflow(
                f"the video's time reaches position {next_position}, the model's context is {decoder.context_length}; "
                "ask for a shorter part of it"
            )
        device = decoder.embedding.device
        ids, is_video = ids.to(device), is_video.to(device)
        features, additions = [], []
        for outputs in processed:
            pixels = outputs["pixel_values_videos"].to(device, model.dtype)
            encoded = model.get_video_features(pixels, outputs["video_grid_thw"].to(device))
            features.append(torch.cat(encoded.pooler_output))
            additions.append(self._additions(encoded))
        return Prompt(
            ids=tuple(ids.tolist()),
            embeddings=merged(decoder, ids, is_video, features),
            rotary=decoder.rotary_from(self.language_model(model).rotary_emb, positions.to(device)),
            is_video=is_video,
            next_position=next_position,
            grid=_cells(grids, processor.video_processor.merge_size).to(device) if grids is not None else None,
            layer_additions=_spread(additions, is_video) if additions and additions[0] else None,
        )

    def _times(self, processor: Any, videos: Sequence[Video]) -> dict[str, Any]:
        """What the model's positions depend on besides the grid."""
        return {}

    def _additions(self, encoded: Any) -> list[Tensor]:
        """Features [rows, hidden size] of one video for the decoder's first layers."""
        return []


class Qwen25VL(Qwen2VL):
    """`Qwen2_5_VLForConditionalGeneration`: temporal positions follow the seconds between frames."""

    def _times(self, processor: Any, videos: Sequence[Video]) -> dict[str, Any]:
        pair = processor.video_processor.temporal_patch_size
        return {"second_per_grid_ts": [pair / sampled_fps(video) for video in videos]}


def sampled_fps(video: Video) -> float:
    """Frames per second as sampled: over the whole source as the processor has it, else over the clip's window."""
    indices = video.source_indices
    whole = video.source_num_frames / len(indices)
    spacing = (indices[-1] - indices[0]) / (len(indices) - 1) if len(indices) > 1 else whole
    if abs(spacing - whole) <= 1.0:  # indices are rounded to frames
        return len(indices) / video.source_num_frames * video.source_fps
    return video.source_fps / max(spacing, 1.0)


def _cells(grids: Tensor, merge_size: int) -> Tensor:
    parts, num_frames = [], 0
    for frames, rows, columns in grids.tolist():
        parts.append(cells(num_frames, frames, rows // merge_size, columns // merge_size))
        num_frames += frames
    return torch.cat(parts)


def _spread(additions: Sequence[Sequence[Tensor]], is_video: Tensor) -> Tensor:
    """Per video and layer, to [layers, prompt rows, hidden size] with zeros at text."""
    layers = torch.stack([torch.cat(layer) for layer in zip(*additions, strict=True)])
    spread = layers.new_zeros(layers.shape[0], len(is_video), layers.shape[2])
    spread[:, is_video] = layers
    return spread
