"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: frames at their own resolution, merged in pairs, 3-axis positions (M-RoPE)."""

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
from vidspec_models.errors import ContextOverflow
from vidspec_models.families.base import Family, cell_grid, parts_of, run_video_processor
from vidspec_models.request import Video

_FRAME_TOKENS = 768  # the cap of qwen-vl-utils; without video settings the far larger cap for images would hold
_FRAMES_AT_ONCE = 32  # per call of processor and tower; a multiple of pairs and of DyCoke's windows
_ROUNDED_AWAY = 3 / 4  # most cells per pair lost to rounding: DyCoke rounds 3 of 4 pairs down, others to nearest
_SHORTEST_TIME = "<0.0 seconds>"  # Qwen3 writes the time of each pair into the prompt


class Qwen2VL(Family):
    """`Qwen2VLForConditionalGeneration`: one temporal position per pair of frames.

    In the tower a pair attends only to itself, so pairs can be encoded in groups. Positions follow place and time, so a
    video may have more rows than the context, as long as the rows that stay fit.
    """

    num_frames = 32

    @property
    def max_frames(self) -> int | None:
        """None: the processor's `max_frames` only limits its own sampling."""
        return None

    def video_arguments(self) -> Mapping[str, Any]:
        ours = self.processor.video_processor
        most = min(ours.size["longest_edge"], _FRAME_TOKENS * (ours.patch_size * ours.merge_size) ** 2)
        size = {"shortest_edge": min(ours.size["shortest_edge"], most), "longest_edge": most}
        return {"size": size, "cap_pixels_per_frame": True}  # as qwen-vl-utils: all frames share the video's budget

    def num_video_tokens(self, video: Video) -> int:
        return self._num_pairs(video) * self._num_cells(video)

    def num_kept_rows(self, video: Video, ratio: float) -> int:
        num_pairs, num_cells = self._num_pairs(video), self._num_cells(video)
        if num_pairs < 2 or ratio == 1:
            return num_pairs * num_cells
        return max(num_pairs, int(num_pairs * (ratio * num_cells - _ROUNDED_AWAY)))  # at least a cell of every pair

    def _num_pairs(self, video: Video) -> int:
        return -(-len(video.frames) // int(self.processor.video_processor.temporal_patch_size))

    def _num_cells(self, video: Video) -> int:
        """Cells of a pair of frames."""
        ours, size = self.processor.video_processor, self._size(video)
        num_cells: int = size.height * size.width // (ours.patch_size * ours.merge_size) ** 2
        return num_cells

    def encode_parts(self, video: Video, is_cancelled: Callable[[], bool]) -> Iterator[EncodedVideo]:
        size, seconds = self._size(video), self._seconds_per_patch(video)
        for part in parts_of(video, _FRAMES_AT_ONCE, is_cancelled):
            yield replace(self._encoded(part, size), seconds_per_patch=seconds)

    def _encoded(self, part: Video, size: SizeDict) -> EncodedVideo:
        """Encode a part at the whole video's frame size: for the part alone the processor would choose another size."""
        model, processor = self.model, self.processor
        outputs = run_video_processor(processor, part, self.video_arguments(), size)
        pixels, patches = outputs["pixel_values_videos"].to(model.device, model.dtype), outputs["video_grid_thw"]
        encoded = model.get_video_features(pixels, patches.to(model.device))
        (num_pairs, num_rows, num_columns), merge = patches[0].tolist(), processor.video_processor.merge_size
        shape = (num_pairs, num_rows // merge, num_columns // merge)
        return EncodedVideo(
            placeholder_text=processor.replace_video_token(outputs, video_idx=0),
            features=torch.cat(encoded.pooler_output),
            shape=shape,
            grid=cell_grid(*shape),
            deepstack=self._deepstack(encoded),
            patches=patches,
            key=part.key,
        )

    def _size(self, video: Video) -> SizeDict:
        """Size of the frames that the tower gets, from the processor's own method applied to meta tensors."""
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
        """Computed for every request, since the positions that the module keeps may be another request's."""
        patches = [video.patches for video in videos if video.patches is not None]
        seconds = [video.seconds_per_patch for video in videos if video.seconds_per_patch is not None]
        positions, _ = self.model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=2 * is_video.int()[None],  # 0: text, 2: video
            video_grid_thw=torch.cat(patches) if patches else None,
            **({"second_per_grid_ts": seconds} if seconds else {}),
        )
        if (furthest := int(positions.max())) >= decoder.context_length - 1:
            reason, remedy = ("video's time", "a shorter part of it") if seconds else ("prompt", "fewer frames")
            raise ContextOverflow(
                f"the {reason} reaches position {furthest}, but the model's context is {decoder.context_length}; "
                f"ask for {remedy}"
            )
        embedding, next_position = decoder.embedding, int(positions[..., -1].max()) + 1
        there = positions[..., stays].to(embedding.device)
        rotary = rotary_values(self.language_model.rotary_emb, embedding, there)
        return rotary, next_position  # as `generate`; positions of the video's time may be larger

    def _seconds_per_patch(self, video: Video) -> float | None:
        """Duration of a patch, if the model's positions depend on it."""
        return None

    def _deepstack(self, encoded: Any) -> tuple[Tensor, ...]:
        """Features [rows, hidden size] of one video for the decoder's first layers."""
        return ()


class Qwen25VL(Qwen2VL):
    """`Qwen2_5_VLForConditionalGeneration`: temporal positions follow the seconds between frames."""

    def _seconds_per_patch(self, video: Video) -> float | None:
        return float(self.processor.video_processor.temporal_patch_size) / sampled_fps(video)


class Qwen3VL(Qwen2VL):
    """`Qwen3VLForConditionalGeneration` (dense): time stamps in the prompt's words; features
    are also added after the decoder's first layers (deepstack).
    """

    def video_arguments(self) -> Mapping[str, Any]:
        return {"cap_pixels_per_frame": True}  # as qwen-vl-utils; without it a few frames take a whole video's tokens

    def num_video_tokens(self, video: Video) -> int:
        video = _at_least_a_pair(video)
        return super().num_video_tokens(video) + self._num_words(video)

    def num_kept_rows(self, video: Video, ratio: float) -> int:
        video = _at_least_a_pair(video)
        return super().num_kept_rows(video, ratio) + self._num_words(video)

    def _num_words(self, video: Video) -> int:
        """The least number of word tokens: a time and a mark before each pair's cells, and a mark after them."""
        processor = self.processor
        words = f"{_SHORTEST_TIME}{processor.vision_start_token}{processor.vision_end_token}"
        ids = processor.tokenizer(words, add_special_tokens=False)["input_ids"]
        return len(ids) * self._num_pairs(video)

    def encode_parts(self, video: Video, is_cancelled: Callable[[], bool]) -> Iterator[EncodedVideo]:
        return super().encode_parts(_at_least_a_pair(video), is_cancelled)

    def deepstack(self, videos: Sequence[EncodedVideo], is_video: Tensor) -> Tensor | None:
        """Per video and layer, spread over the prompt's rows with zeros at text."""
        if not videos or not videos[0].deepstack:
            return None
        layers = torch.stack([torch.cat(layer) for layer in zip(*(video.deepstack for video in videos), strict=True)])
        spread = layers.new_zeros(layers.shape[0], len(is_video), layers.shape[2])
        spread[:, is_video] = layers
        return spread

    def _deepstack(self, encoded: Any) -> tuple[Tensor, ...]:
        # transformers 5.17: the rows of all videos in one tensor
        return tuple(rows if torch.is_tensor(rows) else rows[0] for rows in encoded.deepstack_features)


def _at_least_a_pair(video: Video) -> Video:
    """Repeat a single frame, since the processor refuses one; the last frame of an odd number is repeated anyway."""
    if len(video.frames) > 1:
        return video
    return replace(video, frames=np.repeat(video.frames, 2, axis=0), source_indices=video.source_indices * 2)


def sampled_fps(video: Video) -> float:
    """Sampled frames per second: as the processor computes it if the whole source was sampled, else in the clip."""
    indices = video.source_indices
    whole = video.source_num_frames / len(indices)
    spacing = (indices[-1] - indices[0]) / (len(indices) - 1) if len(indices) > 1 else whole
    if abs(spacing - whole) * (len(indices) - 1) <= 1.0:  # tolerance: first and last index are rounded to frames
        return len(indices) / video.source_num_frames * video.source_fps
    return video.source_fps / max(spacing, 1.0)
