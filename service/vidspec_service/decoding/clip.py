"""Which frames a caller wants of a video, and what decoding returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

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
