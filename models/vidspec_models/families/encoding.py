"""What all families share: conversations and videos through the checkpoint's own template and processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vidspec_models.decoder import Decoder
from vidspec_models.inputs import Prompt, Turn, Video


def conversation(processor: Any, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns in the structure that transformers' chat templates read: media first, then text."""
    return [
        {
            "role": turn.role,
            "content": [{"type": "video"}] * turn.num_videos
            + [{"type": "text", "text": _without_placeholders(processor, turn.text)}],
        }
        for turn in turns
    ]


def _without_placeholders(processor: Any, text: str) -> str:
    """A user may write "<video>" and mean the letters: a blank keeps them from standing for frames."""
    for token in (processor.video_token, processor.image_token):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


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


def encode(
    processor: Any, turns: Sequence[Turn], videos: Sequence[Video], arguments: Mapping[str, Any]
) -> tuple[Tensor, list[Any]]:
    """Token ids [P] with expanded placeholders, and the video processor's outputs for each video.

    The steps of the processor's own call, but one video at a time: in one request clips differ in size and length.
    """
    text = processor.apply_chat_template(conversation(processor, turns), add_generation_prompt=True, tokenize=False)
    processed = [
        processor.video_processor(
            [video.frames],
            video_metadata=[metadata(video)],
            do_sample_frames=False,
            return_metadata=True,
            return_tensors="pt",
            **arguments,
        )
        for video in videos
    ]
    expanded = [processor.replace_video_token(outputs, video_idx=0) for outputs in processed]
    (text,), _ = processor.get_text_with_replacements([text], videos_replacements=expanded)
    bos = processor.tokenizer.bos_token
    has_bos = bos is not None and text.startswith(bos)
    ids = processor.tokenizer(text, add_special_tokens=not has_bos, return_tensors="pt")["input_ids"][0]
    return ids, processed


def merged(decoder: Decoder, ids: Tensor, is_video: Tensor, features: Sequence[Tensor]) -> Tensor:
    """The ids' embeddings, video features [rows, hidden size] in their places."""
    embeddings = decoder.embedding[ids]
    if features:
        embeddings[is_video] = torch.cat(list(features)).to(embeddings.dtype)
    return embeddings


def plain_prompt(
    decoder: Decoder, ids: Tensor, is_video: Tensor, features: Sequence[Tensor], grid: Sequence[Tensor]
) -> Prompt:
    """A prompt with 1-D positions; call after `Decoder.require_room`."""
    return Prompt(
        ids=tuple(ids.tolist()),
        embeddings=merged(decoder, ids, is_video, features),
        rotary=decoder.prompt_rotary(len(ids)),
        is_video=is_video,
        next_position=len(ids),
        grid=torch.cat(list(grid)).to(ids.device) if grid else None,
    )


def cells(first_frame: int, num_frames: int, num_rows: int, num_columns: int) -> Tensor:
    """(frame, row, column) of every cell in reading order, int64 [cells, 3]."""
    frames = torch.arange(first_frame, first_frame + num_frames)
    return torch.cartesian_prod(frames, torch.arange(num_rows), torch.arange(num_columns))
