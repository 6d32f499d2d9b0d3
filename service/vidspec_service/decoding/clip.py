"""Which frames a caller wants of a video, and what decoding returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from vidspec_service.decoding.limits import DecodingLimits, over_limit
from vidspec_service.errors import InvalidRequest

if TYPE_CHECKING:  # it loads numpy, without which a decode child starts twice as fast
    from vidspec_models.request import Video

MAX_FPS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSequence:
    """A client's own frames: JPEG images one after the other in the file, and when each is shown."""

    num_bytes: tuple[int, ...]  # [N] of each image
    timestamps_s: tuple[float, ...]  # [N] 0 or more, at least 1 ms apart
    fps: float | None = None  # frames per second, if the times were computed from it


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRequest:
    """Either `fps` or `num_frames` (neither: the service fills in num_frames), over [start_s, end_s)."""

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    is_still: bool = False  # the file is an image: a clip of one frame
    sequence: FrameSequence | None = None  # the file is a client's own frames: all of them, if nothing else is asked
    num_sharing: int = 1  # videos of the request: its limits and the default number of frames are shared out equally


class Part(msgspec.Struct, frozen=True):
    """Which of the shares of a clip's frames one child decodes."""

    number: int = 0
    count: int = 1


WHOLE = Part()


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag="decoded"):
    """What a child reports of a clip, or a part of it; the pixels [T, H, W, 3] of all chosen frames are in memory."""

    timestamps_s: tuple[float, ...]  # [T]
    source_indices: tuple[int, ...]  # [T]
    source_fps: float
    source_num_frames: int
    duration_s: float
    width: int
    height: int
    codec: str
    warnings: tuple[str, ...]
    orientation: tuple[bool, bool, bool] = (False, False, False)  # how stored frames were turned
    is_sound: bool = True  # no chosen frame is replaced, left out, damaged or of another size

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames."""
        return len(self.timestamps_s) * self.height * self.width * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A decoded video. Rotation is applied; timestamps start at the video's first frame."""

    video: Video
    timestamps_s: tuple[float, ...]  # [T] when each of the frames is shown
    codec: str
    warnings: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Of `video.frames`: after rotation, and after scaling down to max_frame_pixels."""
        return int(self.video.frames.shape[2])

    @property
    def height(self) -> int:
        return int(self.video.frames.shape[1])


def check_request(request: FrameRequest, limits: DecodingLimits) -> None:
    """Refuse what no clip could satisfy: InvalidRequest or VideoTooLarge, `param` set. Needs no video."""
    check_agreement(request)
    if request.fps is not None and not 0 < request.fps <= MAX_FPS:  # also refuses NaN
        raise InvalidRequest(f"fps must be above 0 and at most {MAX_FPS:g}.", param="fps")
    for name, count in (("num_frames", request.num_frames), ("max_frames", request.max_frames)):
        if count is not None and count < 1:
            raise InvalidRequest(f"{name} must be at least 1.", param=name)
    if request.num_frames is not None and request.num_frames > limits.max_frames:
        asked = f"num_frames is {request.num_frames}"
        raise over_limit(asked, limits.told(limits.max_frames), "VIDSPEC_MAX_FRAMES", param="num_frames")
    for name, time_s in (("start_s", request.start_s), ("end_s", request.end_s)):
        if time_s is not None and not (time_s >= 0 and math.isfinite(time_s)):
            raise InvalidRequest(f"{name} must be a number of seconds, 0 or more.", param=name)


def check_agreement(request: FrameRequest) -> None:
    """Refuse fields that exclude each other: InvalidRequest, `param` set."""
    if request.fps is not None and request.num_frames is not None:
        raise InvalidRequest("Give fps or num_frames, not both.", param="fps")
    if request.end_s is not None and request.end_s <= (request.start_s or 0.0):
        raise InvalidRequest("end_s must be greater than start_s.", param="end_s")
