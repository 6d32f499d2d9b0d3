"""Clips: chosen frames of a video, from memory where the same were chosen before, else from the decoder."""

from __future__ import annotations

import hashlib
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

from vidspec_service.api.lru import Lru
from vidspec_service.decoding.selection import Clip, FrameRequest
from vidspec_service.telemetry import Metrics

# What a small clip counts for: its memory came from a decoder and holds a file descriptor as long as it is here.
LEAST_BYTES = 1024 * 1024


class Decoder(Protocol):
    """What the api asks of `decoding.pool.DecodePool`."""

    async def decode(self, path: Path, request: FrameRequest, default_num_frames: int) -> Clip:
        """Choose and decode frames of the file at `path`; raises VideoError. Cancelling stops the decode."""
        ...


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video on our disk, under a name of ours."""

    path: Path
    num_bytes: int
    content_id: str  # names the bytes: equal content, equal id
    is_still: bool = False  # an image


@dataclass(frozen=True, slots=True)
class ClipKey:
    """Which frames: whose video, its content, and how they are chosen. Callers never share: time would tell one
    what another has sent."""

    caller: str
    content_id: str
    request: FrameRequest

    @property
    def digest(self) -> str:
        """The same as one word, for those who must not know callers: equal words mean equal frames."""
        return hashlib.sha256(repr((self.caller, self.content_id, astuple(self.request))).encode()).hexdigest()


class Clips:
    """Frames in memory, under a budget of bytes and for as long as videos are kept."""

    def __init__(self, decoder: Decoder, metrics: Metrics, kept: Lru[ClipKey, Clip]) -> None:
        self._decoder = decoder
        self._metrics = metrics
        self._kept = kept

    async def clip(self, key: ClipKey, file: VideoFile, default_num_frames: int) -> Clip:
        """The frames that `key` names, of `file`; raises what `Decoder.decode` raises."""
        kept = self._kept.get(key)
        self._metrics.clip_looked_up(is_hit=kept is not None)
        if kept is not None:
            return kept
        began = time.monotonic()
        clip = await self._decoder.decode(file.path, key.request, default_num_frames)
        self._metrics.video_decoded(
            seconds=time.monotonic() - began, num_bytes=file.num_bytes, num_frames=len(clip.timestamps_s)
        )
        self._kept.put(key, clip, max(LEAST_BYTES, clip.video.frames.nbytes))
        return clip

    def forget(self, caller: str, content_id: str) -> None:
        """Let go of every frame of a video."""
        for key, _ in self._kept.items():
            if (key.caller, key.content_id) == (caller, content_id):
                self._kept.drop(key)

    def expire(self) -> None:
        """Let go of what is too old."""
        self._kept.expire()
