"""Turns a valid body and a decoded clip into what engine and decoder are asked. Pure, but for the seed."""

from __future__ import annotations

import secrets

from vidspec_service.api.schemas import VideoChat
from vidspec_service.decoding.clip import Clip
from vidspec_service.decoding.frame_request import FrameRequest
from vidspec_service.engine.types import (
    ChatMessage,
    Compression,
    GenerationRequest,
    SamplingParams,
    VideoInput,
)
from vidspec_service.errors import InvalidRequest
from vidspec_service.settings import Settings


def check_available(chat: VideoChat) -> None:
    """Refuse what the contract has and this version has not: a field that is taken and ignored is a trap."""
    if chat.video_url is not None:
        raise InvalidRequest(
            "This server does not fetch URLs; send the file itself, or a data URL as video.", param="video_url"
        )
    if chat.compression not in (None, Compression.NONE):
        raise InvalidRequest("This server has no lossy compression.", param="compression")


def frame_request(chat: VideoChat) -> FrameRequest:
    """Which frames the client wants."""
    return FrameRequest(
        fps=chat.fps,
        num_frames=chat.num_frames,
        max_frames=chat.max_frames,
        start_s=chat.start_s,
        end_s=chat.end_s,
    )


def generation_request(request_id: str, chat: VideoChat, clip: Clip, settings: Settings) -> GenerationRequest:
    """Everything the engine needs; server defaults fill what the client left open."""
    return GenerationRequest(
        request_id=request_id,
        messages=_turns(chat),
        videos=(_video(clip),),
        max_tokens=chat.max_tokens,
        sampling=SamplingParams(
            temperature=chat.temperature,
            top_p=chat.top_p,
            top_k=chat.top_k,
            seed=secrets.randbits(64) if chat.seed is None else chat.seed,
        ),
        stop=chat.stops,
        speculation=chat.speculation or settings.speculation,
    )


def _turns(chat: VideoChat) -> tuple[ChatMessage, ...]:
    if chat.messages is None:
        return (ChatMessage(role="user", text=chat.prompt or "", num_videos=1),)
    first_user = next(index for index, message in enumerate(chat.messages) if message.role == "user")
    return tuple(
        ChatMessage(role=message.role, text=message.content, num_videos=int(index == first_user))
        for index, message in enumerate(chat.messages)
    )


def _video(clip: Clip) -> VideoInput:
    return VideoInput(
        frames=clip.frames,
        timestamps_s=clip.timestamps_s,
        source_indices=clip.source_indices,
        source_fps=clip.source_fps,
        source_num_frames=clip.source_num_frames,
        duration_s=clip.duration_s,
    )
