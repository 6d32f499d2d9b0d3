"""What a caller wants of a video, how much that may cost, and what decoding returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import msgspec

from vidspec_service.errors import VideoTooLarge

if TYPE_CHECKING:  # it loads numpy, without which a decode child starts twice as fast
    from vidspec_models.request import Video


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSequence:
    """A client's own frames: JPEG images one after the other in the file, and when each is shown."""

    num_bytes: tuple[int, ...]  # [N] of each image
    timestamps_s: tuple[float, ...]  # [N] 0 or more, at least 1 ms apart
    fps: float | None = None  # frames per second, if the times were computed from it


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRequest:
    """Either `fps` or `num_frames` (neither: the default number of frames), over [start_s, end_s)."""

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    is_still: bool = False  # the file is an image: a clip of one frame
    sequence: FrameSequence | None = None  # the file is a client's own frames: all of them, if nothing else is asked
    num_sharing: int = 1  # videos of the request: its limits and the default number of frames are shared out equally


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingLimits:
    """How much video one request may cost; checked before memory is allocated."""

    max_bytes: int = 256 * 1024 * 1024
    max_duration_s: float = 3600.0
    max_pixels: int = 4096 * 2304  # width x height of one source frame
    max_frame_pixels: int = 1024 * 1024  # larger frames are scaled down to this, aspect kept: models see less
    max_source_frames: int = 250_000  # packets walked in the timestamp scan
    max_frames: int = 768  # frames handed to the model
    default_num_frames: int = 8  # of a request that does not say; a server takes the operator's or the model's number
    max_decoded_bytes: int = 512 * 1024 * 1024  # chosen frames x pixels x 3
    timeout_s: float = 60.0  # wall clock of one decode child
    num_sharing: int = 1  # videos of the request, among which frames and their bytes have been divided

    def shared(self, num_videos: int) -> DecodingLimits:
        """The limits for each of `num_videos` videos of one request."""
        return replace(
            self,
            max_frames=max(1, self.max_frames // num_videos),
            default_num_frames=max(1, self.default_num_frames // num_videos),
            max_decoded_bytes=self.max_decoded_bytes // num_videos,
            num_sharing=num_videos,
        )

    def describe(self, limit: int) -> str:
        """A limit on frames or their bytes as refusals state it."""
        return f"{limit:,}" if self.num_sharing == 1 else f"{limit:,} for each of {self.num_sharing} videos"

    @property
    def max_padded_pixels(self) -> str:
        """For FFmpeg, which counts a padded frame: lines of a multiple of 64 pixels, edges. `check_pixels` is exact."""
        return str(min(2 * self.max_pixels, 2**31 - 1))

    def check_pixels(self, width: int, height: int) -> None:
        """Raises VideoTooLarge for a frame over the limit."""
        if width * height > self.max_pixels:
            fact = f"A frame has {width}x{height} = {width * height:,} pixels"
            raise over_limit(fact, f"{self.max_pixels:,}", "VIDSPEC_MAX_PIXELS")

    def check_num_frames(self, asked: int | None) -> None:
        """Raises VideoTooLarge if a request asks for more frames than the limit."""
        if asked is not None and asked > self.max_frames:
            fact, limit = f"num_frames is {asked}", self.describe(self.max_frames)
            raise over_limit(fact, limit, "VIDSPEC_MAX_FRAMES", param="num_frames")

    def check_decoded_bytes(self, num_frames: int, width: int, height: int) -> None:
        """Raises VideoTooLarge if so many RGB frames take more bytes than the limit."""
        needed = num_frames * width * height * 3
        if needed > self.max_decoded_bytes:
            fitting = self.max_decoded_bytes // (width * height * 3)
            fact = f"{num_frames} frames of {width}x{height} pixels take {needed:,} bytes ({fitting} frames would fit)"
            raise over_limit(fact, self.describe(self.max_decoded_bytes), "VIDSPEC_MAX_DECODED_BYTES")


def over_limit(fact: str, limit: str, setting: str, *, param: str = "video") -> VideoTooLarge:
    """The one wording of every refusal for size: what it is, what is allowed, what to change."""
    return VideoTooLarge(f"{fact}; the limit is {limit} ({setting}).", param=param)


class Shard(msgspec.Struct, frozen=True):
    """Which of `count` shares of a clip's frames one child decodes."""

    index: int = 0
    count: int = 1


WHOLE = Shard()

# A child that lies gives no number that the messages to the workers cannot hold, as milliseconds either.
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**48)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=2**32)]


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag="decoded"):
    """What a child reports of a clip or a shard of it; the pixels [T, H, W, 3] of all chosen frames are in memory."""

    timestamps_s: tuple[_Seconds, ...]  # [T]
    source_indices: tuple[_Number, ...]  # [T]
    source_fps: Annotated[float, msgspec.Meta(gt=0)]
    source_num_frames: _Count
    duration_s: _Seconds
    width: _Number  # 0 in a shard without a frame
    height: _Number
    codec: str
    warnings: tuple[str, ...]
    orientation: tuple[bool, bool, bool] = (False, False, False)  # how stored frames were turned
    is_sound: bool = True  # no chosen frame is replaced, left out, damaged or of another size

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames."""
        return len(self.timestamps_s) * self.height * self.width * 3


class Clip(Decoded, frozen=True, kw_only=True):
    """A decoded video. Rotation is applied; timestamps start at the video's first frame."""

    video: Video  # its indices and rate may differ from those of the source: see `clip_with`
