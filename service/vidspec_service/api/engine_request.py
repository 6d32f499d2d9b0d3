"""Turns a valid request and a decoded clip into what engine and decoder are asked. Pure, but for the seed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from vidspec_service.api.schemas import Options
from vidspec_service.decoding.selection import Clip, FrameRequest
from vidspec_service.engine.types import ChatMessage, GenerationRequest, VideoInput
from vidspec_service.settings import Settings


@dataclass(frozen=True, slots=True)
class Asked:
    """One valid request, whatever its dialect and without its video."""

    options: Options
    turns: tuple[ChatMessage, ...]


def frame_request(options: Options, *, is_still: bool = False) -> FrameRequest:
    """Which frames the client wants."""
    return FrameRequest(
        fps=options.fps,
        num_frames=options.num_frames,
        max_frames=options.max_frames,
        start_s=options.start_s,
        end_s=options.end_s,
        is_still=is_still,
    )


def generation_request(
    request_id: str, asked: Asked, clip: Clip, clip_digest: str, settings: Settings
) -> GenerationRequest:
    """Everything the engine needs; server defaults fill what the client left open."""
    options = asked.options
    return GenerationRequest(
        request_id=request_id,
        messages=asked.turns,
        videos=(_video(clip, clip_digest),),
        max_tokens=options.max_tokens,
        sampling=options.sampling(secrets.randbits(64)),
        stop=options.stops,
        speculation=options.speculation or settings.speculation,
        compression=options.compression or settings.compression,
    )


def _video(clip: Clip, digest: str) -> VideoInput:
    return VideoInput(
        frames=clip.video.frames,
        timestamps_s=clip.timestamps_s,
        source_indices=clip.video.source_indices,
        source_fps=clip.video.source_fps,
        source_num_frames=clip.video.source_num_frames,
        duration_s=clip.video.duration_s,
        key=digest,
    )
