"""Clips: chosen frames of a video, from memory where the same were chosen before, else from the decoder."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from cachetools import TTLCache

from vidspec_service.api.limits.admission import FairQueue
from vidspec_service.decoding.clip import Clip, FrameRequest, FrameSequence
from vidspec_service.errors import CapacityError
from vidspec_service.telemetry import Metrics

# What a small clip counts for: its memory came from a decoder and holds file descriptors as long as it is here.
LEAST_BYTES = 1024 * 1024

_STILL = FrameRequest(is_still=True, num_frames=1)  # what is asked of videos is not asked of an image

Decode = Callable[[Path, FrameRequest, int], Awaitable[Clip]]
"""`DecodePool.decode`: the frames of the file at a path, so many where the request leaves that open."""


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video on our disk, under a name of ours."""

    path: Path
    num_bytes: int
    content_id: str  # names the bytes: equal content, equal id
    is_still: bool = False  # an image
    sequence: FrameSequence | None = None  # images one after the other


class Clips:
    """Frames in memory, under a budget of bytes and for as long as videos are kept. Callers never share them: time
    would tell one what another has sent."""

    def __init__(self, decode: Decode, metrics: Metrics, max_bytes: int, ttl_s: float, decoders: FairQueue) -> None:
        """As many videos are decoded at a time as `decoders` has slots."""
        self._decode = decode
        self._decoders = decoders
        self._metrics = metrics
        self._kept: TTLCache[tuple[str, str, FrameRequest], Clip] = TTLCache(max_bytes, ttl_s, getsizeof=_num_bytes)

    async def clip(self, caller: str, file: VideoFile, frames: FrameRequest, default_num_frames: int) -> Clip:
        """The frames of `file`, under a `video.key` that says which; raises VideoError. Cancelling stops the decode."""
        asked = _STILL if file.is_still else replace(frames, sequence=file.sequence)
        is_alone = asked.num_frames is not None  # other videos do not change what is chosen
        key = (caller, file.content_id, replace(asked, num_sharing=1) if is_alone else asked)
        clip = self._kept.get(key)
        self._metrics.mm_cache_queries.inc()
        self._metrics.mm_cache_hits.inc(clip is not None)
        if clip is None:
            await self._decoders.acquire(caller)
            try:
                began = time.monotonic()
                clip = await self._decode_or_shed(file.path, asked, default_num_frames)
            finally:
                self._decoders.release(caller)
            self._metrics.video_decode.observe(time.monotonic() - began)
            self._metrics.video_upload_bytes.observe(file.num_bytes)
            self._metrics.video_frames_sampled.observe(len(clip.timestamps_s))
            digest = hashlib.sha256(repr((caller, file.content_id, astuple(key[2]))).encode()).hexdigest()
            clip = replace(clip, video=replace(clip.video, key=digest))
        if _num_bytes(clip) <= self._kept.maxsize:
            self._kept[key] = clip  # its time begins anew
        return clip

    async def _decode_or_shed(self, path: Path, asked: FrameRequest, default_num_frames: int) -> Clip:
        """What is kept goes first where the machine has no more memory or descriptors."""
        try:
            return await self._decode(path, asked, default_num_frames)
        except CapacityError:
            if not self._kept:
                raise
            self._kept.clear()
            return await self._decode(path, asked, default_num_frames)

    def forget(self, caller: str, content_id: str) -> None:
        """Let go of every frame of a video."""
        for key in [key for key in self._kept if key[:2] == (caller, content_id)]:
            self._kept.pop(key, None)

    def expire(self) -> None:
        """Let go of what is too old."""
        self._kept.expire()


def _num_bytes(clip: Clip) -> int:
    return max(LEAST_BYTES, clip.video.frames.nbytes)
