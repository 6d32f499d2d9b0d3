"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: frames at their own resolution, merged in pairs, positions of three axes (M-RoPE)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.image_utils import SizeDict

from vidspec_models.decoder.decoder import Decoder
from vidspec_models.decoder.weights import rotary_values
from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.errors import ContextOverflow, NotWanted
from vidspec_models.families.base import Family, cells, frames_from, processed
from vidspec_models.request import Video

_FRAME_TOKENS = 768  # the cap of qwen-vl-utils; without video settings the cap would be the far larger one of images
_FRAMES_AT_ONCE = 32  # through the processor and the tower; whole pairs, and whole windows of DyCoke's
_ROUNDED_AWAY = 3 / 4  # cells of each pair at most: of four pairs DyCoke rounds three down, others to the nearest
_SHORTEST_TIME = "<0.0 seconds>"  # Qwen3 says when a pair is shown


class Qwen2VL(Family):
    """`Qwen2VLForConditionalGeneration`: one temporal position per pair of frames.

    Its tower lets a pair attend to itself alone, so pairs may come in groups. Its positions go by place and time, so a
    prompt may be made of more video than the context has room for, as long as it has room for the rows that stay.
    """

    num_frames = 32

    @property
    def max_frames(self) -> int | None:
        """None: what its processor has under this name bounds how many it would sample by itself."""
        return None

    def video_arguments(self) -> Mapping[str, Any]:
        ours = self.processor.video_processor
        most = min(ours.size["longest_edge"], _FRAME_TOKENS * (ours.patch_size * ours.merge_size) ** 2)
        size = {"shortest_edge": min(ours.size["shortest_edge"], most), "longest_edge": most}
        return {"size": size, "cap_pixels_per_frame": True}  # as qwen-vl-utils: all frames share what a video may cost

    def num_video_tokens(self, video: Video) -> int:
        return self._num_pairs(video) * self._num_cells(video)

    def num_rows_left(self, video: Video, ratio: float) -> int:
        num_pairs, num_cells = self._num_pairs(video), self._num_cells(video)
        if num_pairs < 2 or ratio == 1:
            return num_pairs * num_cells
        return max(num_pairs, int(num_pairs * (ratio * num_cells - _ROUNDED_AWAY)))  # something of every pair

    def _num_pairs(self, video: Video) -> int:
        return -(-len(video.frames) // int(self.processor.video_processor.temporal_patch_size))

    def _num_cells(self, video: Video) -> int:
        """Of a pair of frames."""
        ours, size = self.processor.video_processor, self._size(video)
        num_cells: int = size.height * size.width // (ours.patch_size * ours.merge_size) ** 2
        return num_cells

    def encode_parts(self, video: Video, is_wanted: Callable[[], bool]) -> Iterator[EncodedVideo]:
        size, seconds = self._size(video), self._seconds_per_patch(video)
        for first in range(0, len(video.frames), _FRAMES_AT_ONCE):
            if first and not is_wanted():
                raise NotWanted("nobody waits for this video any more")
            part = self._encoded(frames_from(video, first, _FRAMES_AT_ONCE), size)
            yield replace(part, seconds_per_patch=seconds)

    def _encoded(self, part: Video, size: SizeDict) -> EncodedVideo:
        """By what its size would be alone, the processor would resize a part otherwise than the whole."""
        model, processor = self.model, self.processor
        outputs = processed(processor, part, self.video_arguments(), size)
        pixels, patches = outputs["pixel_values_videos"].to(model.device, model.dtype), outputs["video_grid_thw"]
        encoded = model.get_video_features(pixels, patches.to(model.device))
        (num_pairs, num_rows, num_columns), merge = patches[0].tolist(), processor.video_processor.merge_size
        shape = (num_pairs, num_rows // merge, num_columns // merge)
        return EncodedVideo(
            words=processor.replace_video_token(outputs, video_idx=0),
            features=torch.cat(encoded.pooler_output),
            shape=shape,
            grid=cells(*shape),
            additions=self._additions(encoded),
            patches=patches,
            key=part.key,
        )

    def _size(self, video: Video) -> SizeDict:
        """Of the video's frames as the tower sees them: the processor is asked, with frames that have no pixels."""
        ours = self.processor.video_processor
        arguments = {"size": ours.size, **self.video_arguments()}
        resized = ours.resize(
            torch.empty(1, *video.frames.shape, dtype=torch.uint8, device="meta").movedim(-1, 2),
            size=SizeDict(**dict(arguments.pop("size"))),
            resample=ours.resample,
            factor=ours.patch_size * ours.merge_size,
            temporal_factor=ours.temporal_patch_size,
            **arguments,
        )
        return SizeDict(height=resized.shape[-2], width=resized.shape[-1])

    def positions(
        self, decoder: Decoder, ids: Tensor, is_video: Tensor, videos: Sequence[EncodedVideo], stays: Tensor
    ) -> tuple[tuple[Tensor, Tensor], int]:
        """Asked for every request: the positions that the module keeps are another request's."""
        patches = [video.patches for video in videos if video.patches is not None]
        seconds = [video.seconds_per_patch for video in videos if video.seconds_per_patch is not None]
        positions, _ = self.model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=2 * is_video.int()[None] if videos else torch.zeros_like(ids)[None],
            video_grid_thw=torch.cat(patches) if patches else None,
            **({"second_per_grid_ts": seconds} if seconds else {}),
        )
        if (furthest := int(positions.max())) >= decoder.context_length - 1:
            reason, remedy = ("video's time", "a shorter part of it") if seconds else ("prompt", "fewer frames")
            raise ContextOverflow(
                f"the {reason} reaches position {furthest}, the model's context is {decoder.context_length}; "
                f"ask for {remedy}"
            )
        embedding, next_position = decoder.embedding, int(positions[..., -1].max()) + 1
        there = positions[..., stays].to(embedding.device)
        rotary = rotary_values(self.language_model.rotary_emb, embedding, there)
        return rotary, next_position  # as `generate`; the video's time may have run ahead of it

    def _seconds_per_patch(self, video: Video) -> float | None:
        """Of time, where the model's positions depend on it."""
        return None

    def _additions(self, encoded: Any) -> tuple[Tensor, ...]:
        """Features [rows, hidden size] of one video for the decoder's first layers."""
        return ()


class Qwen25VL(Qwen2VL):
    """`Qwen2_5_VLForConditionalGeneration`: temporal positions follow the seconds between frames."""

    def _seconds_per_patch(self, video: Video) -> float | None:
        return float(self.processor.video_processor.temporal_patch_size) / sampled_fps(video)


class Qwen3VL(Qwen2VL):
    """`Qwen3VLForConditionalGeneration` (dense): time stamps in the prompt's words; features
    are also added behind the decoder's first layers (deepstack).
    """

    def video_arguments(self) -> Mapping[str, Any]:
        return {"cap_pixels_per_frame": True}  # as qwen-vl-utils; without it a few frames take a whole video's tokens

    def num_video_tokens(self, video: Video) -> int:
        video = _at_least_a_pair(video)
        return super().num_video_tokens(video) + self._num_words(video)

    def num_rows_left(self, video: Video, ratio: float) -> int:
        video = _at_least_a_pair(video)
        return super().num_rows_left(video, ratio) + self._num_words(video)

    def _num_words(self, video: Video) -> int:
        """At least: before each pair's cells there are its time and a mark, behind them another."""
        processor = self.processor
        words = f"{_SHORTEST_TIME}{processor.vision_start_token}{processor.vision_end_token}"
        ids = processor.tokenizer(words, add_special_tokens=False)["input_ids"]
        return len(ids) * self._num_pairs(video)

    def encode_parts(self, video: Video, is_wanted: Callable[[], bool]) -> Iterator[EncodedVideo]:
        return super().encode_parts(_at_least_a_pair(video), is_wanted)

    def layer_additions(self, videos: Sequence[EncodedVideo], is_video: Tensor) -> Tensor | None:
        """Per video and layer, spread over the prompt's rows with zeros at text."""
        if not videos or not videos[0].additions:
            return None
        layers = torch.stack([torch.cat(layer) for layer in zip(*(video.additions for video in videos), strict=True)])
        spread = layers.new_zeros(layers.shape[0], len(is_video), layers.shape[2])
        spread[:, is_video] = layers
        return spread

    def _additions(self, encoded: Any) -> tuple[Tensor, ...]:
        # transformers 5.17: all videos' rows in one
        return tuple(
            rows if torch.is_tensor(rows) and rows.ndim == 2 else rows[0] for rows in encoded.deepstack_features
        )


def _at_least_a_pair(video: Video) -> Video:
    """A single frame twice, which is what odd numbers of frames become anyway; the processor refuses one."""
    if len(video.frames) > 1:
        return video
    return replace(video, frames=np.repeat(video.frames, 2, axis=0), source_indices=video.source_indices * 2)


def sampled_fps(video: Video) -> float:
    """Frames per second as sampled: over the whole source as the processor has it, else over the clip's window."""
    indices = video.source_indices
    whole = video.source_num_frames / len(indices)
    spacing = (indices[-1] - indices[0]) / (len(indices) - 1) if len(indices) > 1 else whole
    if abs(spacing - whole) * (len(indices) - 1) <= 1.0:  # first and last are rounded to frames
        return len(indices) / video.source_num_frames * video.source_fps
    return video.source_fps / max(spacing, 1.0)
