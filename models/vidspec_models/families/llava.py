"""LLaVA-OneVision, LLaVA-NeXT-Video, InternVL 3: frames are squares of cells, positions are plain 1-D positions."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import isqrt

import torch
from torch import Tensor
from torch.nn import functional

from vidspec_models.compression.early_tom import merging_layers
from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.families.base import Family, cell_grid, parts_of, run_video_processor
from vidspec_models.families.merging_tower import merging, read_layers
from vidspec_models.prompt import NO_CELL
from vidspec_models.request import TowerOutput, Video

_FRAMES_AT_ONCE = 16  # per call of processor and tower; 32 frames took 71 ms, with 8 per call 83 ms (Zen 5)
_MERGED_AT_ONCE = 8  # frames are merged only within such a group
# Prefixes of configuration fields that say which layer of the tower is read and how many rows reach the projector.
_READ = ("vision_feature_", "spatial_pool_", "downsample_ratio")
_OF_A_COPY = {"dtype", "_name_or_path", "transformers_version"}  # facts about files, not about the computation
_FRAME_MARKS = 2  # of InternVL, <img> and </img>; the words before them are only counted after tokenising


class SquareFrames(Family):
    """What all three share: the processor resizes all frames to one size, the tower treats each frame by itself."""

    @property
    @abstractmethod
    def side(self) -> int:
        """Rows and columns of a frame's cells."""

    def features(self, pixels: Tensor) -> Tensor:
        """Projected rows [1, all rows, hidden size] or [frames, rows, hidden size] of pixels [1, frames, 3, H, W]."""
        found = self.model.get_video_features(pixels).pooler_output
        features: Tensor = found[0] if isinstance(found, tuple) else found  # transformers 5.17: one for each video
        return features

    def pooled(self, projected: Tensor) -> Tensor:
        """Frames' rows [T, rows, hidden size] from the projector's output."""
        return projected

    @torch.inference_mode()
    def tower_digest(self) -> str:
        """A hash of the tower's weights, of which outputs are read from it, and of how frames become pixels."""
        config, processor = self.model.config.to_dict(), self.processor.video_processor.to_dict()
        facts = {name: value for name, value in config.items() if name.startswith(_READ)}
        vision = {name: value for name, value in config["vision_config"].items() if name not in _OF_A_COPY}
        pixels = {name: value for name, value in processor.items() if name not in _OF_A_COPY}
        digest = hashlib.blake2b(json.dumps([facts, vision, pixels], sort_keys=True, default=str).encode())
        for name, weights in sorted(self.model.model.vision_tower.state_dict().items()):
            digest.update(f"{name} {weights.dtype} {tuple(weights.shape)}".encode())
            digest.update(weights.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def num_video_tokens(self, video: Video) -> int:
        return len(video.frames) * self.side**2

    @contextmanager
    def record_tower(self) -> Iterator[list[Tensor]]:
        """Collects the projector's inputs in order; on the CPU, to save the device's memory."""
        given: list[Tensor] = []
        hook = self.model.model.multi_modal_projector.register_forward_pre_hook(
            lambda _, arguments: given.append(arguments[0].float().cpu())
        )
        try:
            yield given
        finally:
            hook.remove()

    def encode_parts(self, video: Video, is_cancelled: Callable[[], bool]) -> Iterator[EncodedVideo]:
        """Yields the whole video, since its text depends on all of it; the tower gets a few frames at a time."""
        known = video.tower
        text, features = self._run_tower(video, is_cancelled) if known is None else self._from_tower_output(known)
        yield self._encoded(video, text, features)

    def _encoded(self, video: Video, text: str, features: Tensor) -> EncodedVideo:
        shape = (len(video.frames), self.side, self.side)
        return EncodedVideo(
            placeholder_text=text, features=features, shape=shape, grid=cell_grid(*shape), key=video.key
        )

    def _run_tower(
        self,
        video: Video,
        is_cancelled: Callable[[], bool],
        around_tower: Callable[[int], AbstractContextManager[object]] = nullcontext,
        at_once: int = _FRAMES_AT_ONCE,
    ) -> tuple[str, Tensor]:
        """The video's placeholder text and features; `at_once` frames go through the tower inside `around_tower`."""
        features, arguments = [], self.video_arguments()
        for part in parts_of(video, at_once, is_cancelled):
            outputs = run_video_processor(self.processor, part, arguments)
            pixels = outputs["pixel_values_videos"]
            with around_tower(pixels.shape[1]):
                features.append(self.features(pixels.to(self.model.device, self.model.dtype)).flatten(0, 1))
        # The text depends only on the pixels' shape. LLaVA-NeXT-Video's processor makes a NumPy array of them, which a
        # model's bfloat16 could not be.
        all_pixels = pixels.new_zeros(()).expand(1, len(video.frames), *pixels.shape[2:])
        text = self.processor.replace_video_token({**outputs, "pixel_values_videos": all_pixels}, video_idx=0)
        return text, torch.cat(features)

    def _from_tower_output(self, tower: TowerOutput) -> tuple[str, Tensor]:
        """Placeholder text and features from the rows of an equal tower."""
        features = []
        for rows in torch.from_numpy(tower.rows).split(_FRAMES_AT_ONCE):
            projected = self.model.model.multi_modal_projector(rows.to(self.model.device, self.model.dtype))
            features.append(self.pooled(projected).flatten(0, 1))
        return tower.placeholder_text, torch.cat(features)


class LlavaFrames(SquareFrames):
    """Models with a SigLIP or CLIP tower, which can merge frames."""

    @property
    def can_merge_frames(self) -> bool:
        return bool(merging_layers(len(read_layers(self.model))))

    def encode_merged(self, video: Video, ratio: float, is_cancelled: Callable[[], bool]) -> EncodedVideo:
        assert video.tower is None, "its rows are there: nothing is left to merge"
        kept = list[Tensor]()

        @contextmanager
        def around_tower(num_frames: int) -> Iterator[None]:
            with merging(self.model, num_frames) as frames:
                yield
            kept.append(frames.chosen(ratio, self.side))

        text, features = self._run_tower(video, is_cancelled, around_tower, _MERGED_AT_ONCE)
        return self._encoded(video, text, features).only(torch.cat(kept))


class LlavaOnevision(LlavaFrames):
    """`LlavaOnevisionForConditionalGeneration` with its Qwen2 decoder: one newline token after each video."""

    num_frames = 32  # what the released checkpoints were trained on

    @property
    def side(self) -> int:
        vision = self.model.config.vision_config
        side: int = -(-(vision.image_size // vision.patch_size) // 2)
        return side

    def num_video_tokens(self, video: Video) -> int:
        return super().num_video_tokens(video) + 1

    def features(self, pixels: Tensor) -> Tensor:
        num_rows = pixels.shape[1] * self.side**2
        return super().features(pixels)[:, :num_rows]  # without the newline, which 5.17 leaves out itself

    def pooled(self, projected: Tensor) -> Tensor:
        pooled: Tensor = self.model.model.apply_pooling(projected)
        return pooled

    def encode_parts(self, video: Video, is_cancelled: Callable[[], bool]) -> Iterator[EncodedVideo]:
        yield from map(self._with_newline, super().encode_parts(video, is_cancelled))

    def encode_merged(self, video: Video, ratio: float, is_cancelled: Callable[[], bool]) -> EncodedVideo:
        return self._with_newline(super().encode_merged(video, ratio, is_cancelled))

    def _with_newline(self, video: EncodedVideo) -> EncodedVideo:
        newline = self.model.model.image_newline[None].to(video.features.dtype)
        return replace(
            video,
            features=torch.cat((video.features, newline)),
            grid=torch.cat((video.grid, torch.full((1, 3), NO_CELL))),
            kept_mask=None if video.kept_mask is None else functional.pad(video.kept_mask, (0, 1), value=True),
        )


class LlavaNextVideo(LlavaFrames):
    """`LlavaNextVideoForConditionalGeneration` with its Llama (Vicuna, Yi) or Mistral decoder."""

    num_frames = 8  # 144 tokens each; the released 7B has a context of 4096

    @property
    def side(self) -> int:
        vision = self.model.config.vision_config
        side: int = vision.image_size // vision.patch_size // self.model.config.spatial_pool_stride
        return side


class InternVL(SquareFrames):
    """`InternVLForConditionalGeneration` (HF layout) with its Qwen2, Qwen3 or Llama decoder.

    Each frame is an image of its own, of one patch, between marks after the text "Frame1: ".
    """

    num_frames = 32
    placeholder = "image_token_id"

    @property
    def side(self) -> int:
        return isqrt(self.processor.image_seq_length)

    def features(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.model.get_image_features(pixels.flatten(0, 1)).pooler_output
        return features

    def num_video_tokens(self, video: Video) -> int:
        return super().num_video_tokens(video) + _FRAME_MARKS * len(video.frames)
