"""Family: the few things in which video-LLM architectures differ, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor

from vidspec_models.decoder.decoder import Decoder
from vidspec_models.encoder_cache import EncodedVideo
from vidspec_models.errors import ModelError
from vidspec_models.families.conversation import tokenised
from vidspec_models.inputs import CLIP_GAP, VIDEO_BITS, Prompt, PromptIdentity
from vidspec_models.request import ChatTemplate, Turn, Video


class Family(ABC):
    """One architecture, for a loaded model and its processor.

    What is defined here suits families whose frames are images of one size and whose positions count rows.
    """

    num_frames: int  # to sample where the checkpoint does not say
    placeholder = "video_token_id"  # the name, in the configuration, of the id that stands for a video's rows

    def __init__(self, model: Any, processor: Any) -> None:
        self.model = model
        self.processor = processor

    @property
    def language_model(self) -> Any:
        """The transformers text decoder (with `layers`, `norm`, `embed_tokens`, `rotary_emb`)."""
        return self.model.model.language_model

    @property
    def default_num_frames(self) -> int:
        """Frames to sample when the caller names neither fps nor a number."""
        return int(self.processor.video_processor.num_frames or self.num_frames)

    @property
    def max_frames(self) -> int | None:
        """The most frames of a video that the checkpoint was made for, where it says so."""
        most = getattr(self.processor.video_processor, "max_frames", None)
        return None if most is None else int(most)

    def video_arguments(self) -> Mapping[str, Any]:
        """What the video processor must be told besides the frames and their metadata."""
        return {}

    def tower_digest(self) -> str | None:
        """Equal for two models whose towers make the same rows of every video; None where rows cannot be handed on.

        A draft that was distilled from its target often keeps its tower: then one of them runs it. Rows are handed on
        as the projector is given them, since projectors end in language models of different sizes.
        """
        return None

    def heard(self) -> AbstractContextManager[list[Tensor]]:
        """What its tower's rows are meanwhile, float32 [frames, rows, width] on the CPU; see `tower_digest`."""
        return nullcontext([])

    @abstractmethod
    def num_video_tokens(self, video: Video) -> int:
        """Prompt rows that one video takes at least, known before any of its frames is processed."""

    def num_rows_left(self, video: Video, ratio: float) -> int:
        """Rows of the context that it takes at least where about a share of `ratio` of its tokens is chosen.

        As many as without a choice where positions count rows: they count those that are left out, too.
        """
        return self.num_video_tokens(video)

    @abstractmethod
    def encode_parts(self, video: Video, is_wanted: Callable[[], bool]) -> Iterator[EncodedVideo]:
        """Process the frames and run the vision tower: what is the same in every conversation about the video.

        A few frames at a time where that can be, so that neither pixels nor what a tower computes grow with the video.
        Neither is done where the video comes with rows of an equal tower (see `tower_digest`). Raises NotWanted where
        another part is left to do and `is_wanted` says no: what is done is worth keeping.
        """

    @property
    def can_merge_frames(self) -> bool:
        """Whether there is `encode_merged`."""
        return False

    def encode_merged(self, video: Video, ratio: float) -> EncodedVideo:
        """The same by a tower that merges frames which repeat each other, with a share of `ratio` of the rows kept.

        Raises ModelError where it cannot.
        """
        raise ModelError("this model's vision tower cannot merge frames, which earlytom needs; try vidcom2")

    def prepare(
        self,
        decoder: Decoder,
        turns: Sequence[Turn],
        videos: Sequence[EncodedVideo],
        template: ChatTemplate | None,
    ) -> Prompt:
        """Template, tokenise and merge the videos' features into the prompt's embeddings. Raises ContextOverflow.

        Rows of video that are left out have no place in the prompt; the others keep the positions that they have in a
        whole one, and so does the answer.
        """
        ids = tokenised(self.processor, turns, videos, template)
        is_video = ids == getattr(self.model.config, self.placeholder)
        stays = staying(is_video, videos)
        decoder.require_room(int(stays.sum()))
        rotary, next_position = self.positions(decoder, ids, is_video, videos, stays)
        device = decoder.embedding.device
        ids, is_video = ids[stays].to(device), is_video[stays].to(device)
        return Prompt(
            ids=tuple(ids.tolist()),
            embeddings=merged(decoder, ids, is_video, videos),
            rotary=rotary,
            is_video=is_video,
            next_position=next_position,
            grid=joined_grid(videos, ids.device),
            layer_additions=self.layer_additions(videos, is_video),
            identity=identity(ids, is_video, videos),
            video_shapes=tuple(video.shape for video in videos),
        )

    def positions(
        self, decoder: Decoder, ids: Tensor, is_video: Tensor, videos: Sequence[EncodedVideo], stays: Tensor
    ) -> tuple[tuple[Tensor, Tensor], int]:
        """The rotary values of those of a whole prompt's rows that stay, and the position that follows the whole.

        Raises ContextOverflow.
        """
        decoder.require_room(len(ids))
        rows = stays.nonzero()[:, 0].to(decoder.embedding.device)
        cos, sin = decoder.prompt_rotary(len(ids))
        return (cos[rows], sin[rows]), len(ids)

    def layer_additions(self, videos: Sequence[EncodedVideo], is_video: Tensor) -> Tensor | None:
        """[layers, prompt rows, hidden size], see `Prompt`."""
        return None


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


def processed(processor: Any, video: Video, arguments: Mapping[str, Any], size: SizeDict | None = None) -> Any:
    """The video processor's outputs; one video at a time, since in one request clips differ in size and length.

    Frames become of `size`, unset the processor's. They are resized by its own method as they lie in memory, pixel by
    pixel, which gives the same bits in a fifth of the time: it would lay them out colour by colour first.
    """
    ours, frames = processor.video_processor, video.frames
    if ours.do_resize:
        upright = torch.from_numpy(frames).movedim(-1, 1)
        resized = BaseVideoProcessor.resize(ours, upright, size or SizeDict(**dict(ours.size)), ours.resample)
        frames = resized.movedim(1, -1).numpy()
    return ours(
        [frames],
        video_metadata=[metadata(video)],
        do_resize=False,
        do_sample_frames=False,
        return_metadata=True,
        return_tensors="pt",
        **arguments,
    )


def frames_from(video: Video, first: int, count: int) -> Video:
    """So many of a video's frames, or as many as are left; of the same source."""
    chosen = slice(first, first + count)
    return replace(video, frames=video.frames[chosen], source_indices=video.source_indices[chosen])


def staying(is_video: Tensor, videos: Sequence[EncodedVideo]) -> Tensor:
    """bool [P]: which of a whole prompt's rows its prompt has; `is_video`, bool [P], are the videos' in the whole."""
    stays = torch.ones_like(is_video)
    parts = [torch.ones(len(each.features), dtype=torch.bool) if each.stays is None else each.stays for each in videos]
    if parts:
        stays[is_video] = torch.cat(parts)
    return stays


def merged(decoder: Decoder, ids: Tensor, is_video: Tensor, videos: Sequence[EncodedVideo]) -> Tensor:
    """The ids' embeddings [P, hidden size], the videos' features in their places."""
    embeddings = decoder.embedding[ids]
    if videos:
        embeddings[is_video] = torch.cat([video.features for video in videos]).to(embeddings.dtype)
    return embeddings


def joined_grid(videos: Sequence[EncodedVideo], device: torch.device) -> Tensor:
    """The videos' grids one after the other, frames counted through all of them, with CLIP_GAP between them."""
    grids, num_frames = [torch.empty(0, 3, dtype=torch.int64)], 0
    for video in videos:
        grids.append(video.grid_from(num_frames))
        num_frames += video.num_frames + CLIP_GAP
    return torch.cat(grids).to(device)


def identity(ids: Tensor, is_video: Tensor, videos: Sequence[EncodedVideo]) -> PromptIdentity | None:
    """None for a prompt without videos, or with one that has no key or not all of its rows."""
    keys = tuple(video.key for video in videos if video.key is not None and video.stays is None)
    if not keys or len(keys) < len(videos):
        return None
    rows = ids.cpu().numpy().copy()
    numbers = [np.arange(len(video.features)) + (index << VIDEO_BITS) for index, video in enumerate(videos)]
    rows[is_video.cpu().numpy()] = -1 - np.concatenate(numbers)
    return PromptIdentity(video_keys=keys, rows=rows)


def cells(num_frames: int, num_rows: int, num_columns: int) -> Tensor:
    """(frame, row, column) of every cell in reading order, int64 [cells, 3]."""
    return torch.cartesian_prod(torch.arange(num_frames), torch.arange(num_rows), torch.arange(num_columns))
