"""The frames of a request's videos: several are decoded beside each other, and share what one may cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vidspec_service.api.errors import about_video
from vidspec_service.api.services import Services
from vidspec_service.api.store.clips import VideoFile
from vidspec_service.decoding.clip import Clip, FrameRequest
from vidspec_service.decoding.limits import over_limit
from vidspec_service.decoding.pool import all_or_none
from vidspec_service.settings import Settings


async def decode_all(
    services: Services, caller: str, files: Sequence[VideoFile], frames: FrameRequest, default_num_frames: int
) -> list[Clip]:
    """The clip of each file, in order; raises what decoding one does, saying of which. Cancelling stops all.

    `frames` holds for every video. Those that are no images share the limits on frames and their bytes, and the
    default number, equally.
    """
    asked = replace(frames, num_sharing=max(1, sum(not file.is_still for file in files)))

    async def one(index: int, file: VideoFile) -> Clip:
        with about_video(index, len(files)):
            return await services.clips.clip(caller, file, asked, default_num_frames)

    clips = await all_or_none(one(index, file) for index, file in enumerate(files))
    _check_total(clips, services.settings)
    return clips


def _check_total(clips: Sequence[Clip], settings: Settings) -> None:
    """Clips that were decoded for other requests may be larger than their share."""
    num_frames = sum(len(clip.timestamps_s) for clip in clips)
    if num_frames > settings.max_frames:
        fact = f"All videos together have {num_frames} frames"
        raise over_limit(fact, str(settings.max_frames), "VIDSPEC_MAX_FRAMES", param="videos")
    num_bytes = sum(clip.video.frames.nbytes for clip in clips)
    if num_bytes > settings.max_decoded_bytes:
        fact, limit = f"The frames of all videos take {num_bytes:,} bytes", f"{settings.max_decoded_bytes:,}"
        raise over_limit(fact, limit, "VIDSPEC_MAX_DECODED_BYTES", param="videos")
