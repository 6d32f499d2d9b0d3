"""Family: how video-LLM architectures differ, and the code that all of them share."""

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
from vidspec_models.errors import Cancelled, ConversationRefused, ModelError
from vidspec_models.families.conversation import tokenised
from vidspec_models.prompt import CLIP_GAP, VIDEO_BITS, Prompt, PromptIdentity
from vidspec_models.request import ChatTemplate, Turn, Video


class Family(ABC):
    """One architecture, for a loaded model and its processor.

    The defaults here suit families whose frames are images of one size and whose positions count rows.
    """

    num_frames: int  # frames to sample if the checkpoint does not say
    placeholder = "video_token_id"  # configuration field with the token id that stands for a video's rows

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
        """The most frames of a video that the checkpoint was made for, if it says so."""
        most = getattr(self.processor.video_processor, "max_frames", None)
        return None if most is None else int(most)

    def video_arguments(self) -> Mapping[str, Any]:
        """Arguments of the video processor besides the frames and their metadata."""
        return {}

    def tower_digest(self) -> str | None:
        """Equal for two models whose towers make the same rows from every video; None if rows cannot be shared.

        A draft that was distilled from its target often keeps the target's tower: then only one of them runs it. The
        shared rows are the projector's input, since projectors lead to language models of different sizes.
        """
        return None

    def record_tower(self) -> AbstractContextManager[list[Tensor]]:
        """Inside, the list records the tower's output, float32 [frames, rows, width] on the CPU; see `tower_digest`."""
        return nullcontext([])

    @abstractmethod
    def num_video_tokens(self, video: Video) -> int:
        """The least number of prompt rows that a video takes, known before any of its frames is processed."""

    def num_kept_rows(self, video: Video, ratio: float) -> int:
        """The least number of rows of the context that a video takes if about a share `ratio` of its tokens is kept.

        Here as many as without a choice: positions that count rows also count the rows that are left out.
        """
        return self.num_video_tokens(video)

    @abstractmethod
    def encode_parts(self, video: Video, is_cancelled: Callable[[], bool]) -> Iterator[EncodedVideo]:
        """Process the frames and run the vision tower: the work that is the same in every conversation about the video.

        Takes a few frames at a time if it can, so that memory for pixels and activations does not grow with the video.
        Both steps are skipped if the video comes with rows of an equal tower (see `tower_digest`). Raises Cancelled if
        `is_cancelled` returns True and other frames are left; after the last ones it is not asked.
        """

    @property
    def can_merge_frames(self) -> bool:
        """Whether `encode_merged` is supported."""
        return False

    def encode_merged(self, video: Video, ratio: float, is_cancelled: Callable[[], bool]) -> EncodedVideo:
        """Encode with a tower that merges frames which repeat each other; a share `ratio` of the rows is kept.

        Raises ModelError if the tower cannot merge frames, and Cancelled as `encode_parts` does.
        """
        raise ModelError("this model's vision tower cannot merge frames, which earlytom needs; try vidcom2")

    def prepare(
        self, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[EncodedVideo], template: ChatTemplate | None
    ) -> Prompt:
        """Template, tokenise and merge the videos' features into the prompt's embeddings. Raises ContextOverflow
        and ConversationRefused.

        Video rows that are left out are not part of the prompt; the other rows and the answer keep the positions that
        they would have in the whole prompt.
        """
        ids = tokenised(self.processor, turns, videos, template)
        if len(unknown := ids[ids >= len(decoder.embedding)]):  # on a GPU its lookup would end the whole process
            raise ConversationRefused(
                f"the tokenizer has a token {int(unknown[0])}, but the model has no weights for it"
            )
        is_video = ids == getattr(self.model.config, self.placeholder)
        stays = kept_rows(is_video, videos)
        decoder.require_room(int(stays.sum()))
        rotary, next_position = self.positions(decoder, ids, is_video, videos, stays)
        device = decoder.embedding.device
        ids, is_video = ids[stays].to(device), is_video[stays].to(device)
        return Prompt(
            ids=tuple(ids.tolist()),
            embeddings=merge_features(decoder, ids, is_video, videos),
            rotary=rotary,
            is_video=is_video,
            next_position=next_position,
            grid=concatenate_grids(videos, ids.device),
            deepstack=self.deepstack(videos, is_video),
            identity=prompt_identity(ids, is_video, videos),
            video_shapes=tuple(video.shape for video in videos),
        )

    def positions(
        self, decoder: Decoder, ids: Tensor, is_video: Tensor, videos: Sequence[EncodedVideo], stays: Tensor
    ) -> tuple[tuple[Tensor, Tensor], int]:
        """Rotary values of the whole prompt's rows marked in `stays`, and the position after the whole prompt.

        Raises ContextOverflow.
        """
        decoder.require_room(len(ids))
        rows = stays.nonzero()[:, 0].to(decoder.embedding.device)
        cos, sin = decoder.prompt_rotary(len(ids))
        return (cos[rows], sin[rows]), len(ids)

    def deepstack(self, videos: Sequence[EncodedVideo], is_video: Tensor) -> Tensor | None:
        """`Prompt.deepstack`: [layers, prompt rows, hidden size]."""
        return None


def metadata(video: Video) -> dict[str, Any]:
    """Facts about the source: processors that write time stamps must not guess them from the sampled frames."""
    return {
        "total_num_frames": video.source_num_frames,
        "fps": video.source_fps,
        "duration": video.duration_s,
        "frames_indices": list(video.source_indices),
        "height": video.frames.shape[1],
        "width": video.frames.shape[2],
    }


def run_video_processor(
    processor: Any, video: Video, arguments: Mapping[str, Any], size: SizeDict | None = None
) -> Any:
    """The video processor's outputs; one video at a time, since clips of one request differ in size and length.

    Frames are resized to `size`, by default the processor's size, with the processor's own method but in their
    channels-last layout: the same bits in a fifth of the time, since the processor would copy to channels-first before.
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


def parts_of(video: Video, most: int, is_cancelled: Callable[[], bool]) -> Iterator[Video]:
    """The video's parts of at most `most` frames each. Raises Cancelled as `Family.encode_parts` does."""
    for first in range(0, len(video.frames), most):
        if first and is_cancelled():
            raise Cancelled("nobody waits for this video any more")
        chosen = slice(first, first + most)
        yield replace(video, frames=video.frames[chosen], source_indices=video.source_indices[chosen])


def kept_rows(is_video: Tensor, videos: Sequence[EncodedVideo]) -> Tensor:
    """bool [P]: which of the whole prompt's P rows stay in the prompt; `is_video`, bool [P], marks the video rows."""
    stays = torch.ones_like(is_video)
    parts = [
        torch.ones(len(each.features), dtype=torch.bool) if each.kept_mask is None else each.kept_mask
        for each in videos
    ]
    if parts:
        stays[is_video] = torch.cat(parts)
    return stays


def merge_features(decoder: Decoder, ids: Tensor, is_video: Tensor, videos: Sequence[EncodedVideo]) -> Tensor:
    """The ids' embeddings [P, hidden size], with the videos' features in the video rows."""
    embeddings = decoder.embedding[ids]
    if videos:
        embeddings[is_video] = torch.cat([video.features for video in videos]).to(embeddings.dtype)
    return embeddings


def concatenate_grids(videos: Sequence[EncodedVideo], device: torch.device) -> Tensor:
    """The videos' grids joined; frame numbers continue from video to video, with CLIP_GAP between two videos."""
    grids, num_frames = [torch.empty(0, 3, dtype=torch.int64)], 0
    for video in videos:
        grids.append(video.grid_from(num_frames))
        num_frames += video.num_frames + CLIP_GAP
    return torch.cat(grids).to(device)


def prompt_identity(ids: Tensor, is_video: Tensor, videos: Sequence[EncodedVideo]) -> PromptIdentity | None:
    """None if a video has no key."""
    keys = tuple(video.key for video in videos if video.key is not None)
    if len(keys) < len(videos):
        return None
    rows = ids.cpu().numpy().copy()
    if videos:
        numbers = [video.row_numbers + (index << VIDEO_BITS) for index, video in enumerate(videos)]
        rows[is_video.cpu().numpy()] = -1 - np.concatenate(numbers)
    return PromptIdentity(video_keys=keys, rows=rows)


def cell_grid(num_frames: int, num_rows: int, num_columns: int) -> Tensor:
    """(frame, row, column) of every cell in reading order, int64 [cells, 3]."""
    return torch.cartesian_prod(torch.arange(num_frames), torch.arange(num_rows), torch.arange(num_columns))
