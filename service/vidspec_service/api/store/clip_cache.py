"""ClipCache: the chosen frames of videos, from memory if the same frames were chosen before, else from the decoder."""

from __future__ import annotations

import asyncio
import hashlib
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

from cachetools import TTLCache
from msgspec import structs

from vidspec_service.api.limits.admission import FairQueue
from vidspec_service.api.schemas.fields import VideoFile, about_video
from vidspec_service.decoding.clip import Clip, FrameRequest, over_limit
from vidspec_service.decoding.pool import all_or_none
from vidspec_service.errors import CapacityError, DecoderLost, VideoError, VideoUnreadable, VideoUnsupported
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics

# A clip counts for at least this much of the budget: however small, it holds file descriptors while it is cached.
MIN_CLIP_BYTES = 1024 * 1024

_STILL = FrameRequest(is_still=True, num_frames=1)  # the options for videos do not apply to an image

Decode = Callable[[Path, FrameRequest], Awaitable[Clip]]
"""`DecodePool.decode`: the frames of the file at a path."""


class _Turn(asyncio.Lock):
    """Held by the one of several equal requests that decodes, while the others wait for what it finds."""

    fault: Callable[[], VideoError] | None = None  # of the video: nobody who has waited need try again


class ClipCache:
    """Frames in memory, within a budget of bytes and for as long as videos are kept.

    Callers never share them: the response time would tell one caller what another has sent.
    """

    def __init__(self, settings: Settings, decode: Decode, metrics: Metrics) -> None:
        self._decode = decode
        self._decoders = FairQueue(settings.decode_workers + 1, most=settings.decode_workers)
        self._metrics = metrics
        self._max_frames = settings.max_frames
        self._max_decoded_bytes = settings.max_decoded_bytes
        self._kept: TTLCache[tuple[str, str, FrameRequest], Clip] = TTLCache(
            settings.max_cached_frame_bytes, settings.video_ttl_s, getsizeof=_num_bytes
        )
        self._turns: weakref.WeakValueDictionary[tuple[str, str, FrameRequest], _Turn] = weakref.WeakValueDictionary()

    async def get_all(self, caller: str, files: Sequence[VideoFile], frames: FrameRequest) -> list[Clip]:
        """The clip of each of a request's files, in order; raises what `get` does, naming the video.

        The files are decoded in parallel; cancelling stops all. `frames` applies to every video. Those that are not
        images share the limits on frames and their bytes, and the default number of frames, equally.
        """
        asked = replace(frames, num_sharing=sum(not file.is_still for file in files))

        async def one(index: int, file: VideoFile) -> Clip:
            with about_video(index, len(files)):
                return await self.get(caller, file, asked)

        clips = await all_or_none(one(index, file) for index, file in enumerate(files))
        self._check_total(files, clips)
        return clips

    def _check_total(self, files: Sequence[VideoFile], clips: Sequence[Clip]) -> None:
        """Raises VideoTooLarge: clips that were decoded for other requests may be larger than their share here.

        Videos alone share the frames, so images do not count against these; `max_videos_per_request` bounds them.
        """
        num_frames = sum(len(clip.timestamps_s) for file, clip in zip(files, clips, strict=True) if not file.is_still)
        if num_frames > self._max_frames:
            fact = f"All videos together have {num_frames} frames"
            raise over_limit(fact, str(self._max_frames), "VIDSPEC_MAX_FRAMES", param="videos")
        num_bytes = sum(clip.video.frames.nbytes for clip in clips)
        if num_bytes > self._max_decoded_bytes:
            fact, limit = f"The frames of all videos take {num_bytes:,} bytes", f"{self._max_decoded_bytes:,}"
            raise over_limit(fact, limit, "VIDSPEC_MAX_DECODED_BYTES", param="videos")

    async def get(self, caller: str, file: VideoFile, frames: FrameRequest) -> Clip:
        """The frames of `file`; `video.key` identifies them. Raises VideoError. Cancelling stops the decode."""
        asked = _STILL if file.is_still else replace(frames, sequence=file.sequence)
        is_alone = asked.num_frames is not None  # the number of other videos does not change which frames are chosen
        key = (caller, file.content_id, replace(asked, num_sharing=1) if is_alone else asked)
        self._metrics.mm_cache_queries.inc()
        # Several questions about a video that come together wait for one decode.
        async with (turn := self._turns.setdefault(key, _Turn())):
            if turn.fault is not None:
                raise turn.fault()
            clip = self._kept.get(key)
            self._metrics.mm_cache_hits.inc(clip is not None)
            if clip is None:
                try:
                    clip = await self._decode_for(caller, file, asked)
                except (VideoUnreadable, VideoUnsupported) as error:
                    if not isinstance(error, DecoderLost):
                        turn.fault = partial(type(error), error.message, param=error.param)
                        del self._turns[key]  # who comes from now on tries again
                    raise
                digest = hashlib.sha256(repr((caller, file.content_id, astuple(key[2]))).encode()).hexdigest()
                clip = structs.replace(clip, video=replace(clip.video, key=digest))
            if _num_bytes(clip) <= self._kept.maxsize:
                self._kept[key] = clip  # its lifetime starts again
            return clip

    async def _decode_for(self, caller: str, file: VideoFile, asked: FrameRequest) -> Clip:
        await self._decoders.acquire(caller)
        try:
            began = time.monotonic()
            clip = await self._decode_or_shed(file.path, asked)
        finally:
            self._decoders.release(caller)
        self._metrics.video_decode.observe(time.monotonic() - began)
        self._metrics.video_upload_bytes.observe(file.num_bytes)
        self._metrics.video_frames_sampled.observe(len(clip.timestamps_s))
        return clip

    async def _decode_or_shed(self, path: Path, asked: FrameRequest) -> Clip:
        """Decode; if the machine has no memory or descriptors left, drop all kept clips and try once more."""
        try:
            return await self._decode(path, asked)
        except CapacityError:
            if not self._kept:
                raise  # a second try would only keep the client, and a decoder, for as long again
            self._kept.clear()
            return await self._decode(path, asked)

    def forget(self, caller: str, content_id: str) -> None:
        """Drop every clip of a video."""
        for key in [key for key in self._kept if key[:2] == (caller, content_id)]:
            self._kept.pop(key, None)

    def expire(self) -> None:
        """Drop clips that are too old."""
        self._kept.expire()


def _num_bytes(clip: Clip) -> int:
    return max(MIN_CLIP_BYTES, clip.video.frames.nbytes)
