"""What travels between the pool and a decode child: a JSON job in, a JSON answer out; pixels go beside it.

Nothing is pickled, and errors travel as a name from a closed table: a child taken over by a hostile file can
lie about a clip, but cannot make the service run or show anything else.
"""

from __future__ import annotations

import msgspec

from vidspec_service.decoding.frame_request import FrameRequest
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.errors import (
    InvalidRequest,
    RequestError,
    VideoTooLarge,
    VideoUnreadable,
    VideoUnsupported,
)

_TRAVELLERS = (InvalidRequest, VideoTooLarge, VideoUnreadable, VideoUnsupported)
_ERRORS: dict[str, type[RequestError]] = {error.__name__: error for error in _TRAVELLERS}


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Pool to child."""

    path: str
    request: FrameRequest
    default_num_frames: int
    limits: DecodingLimits


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag="decoded"):
    """Child to pool, with the pixels' file descriptor: a Clip without its frames."""

    timestamps_s: tuple[float, ...]  # [T]
    source_indices: tuple[int, ...]  # [T]
    source_fps: float
    source_num_frames: int
    duration_s: float
    width: int
    height: int
    codec: str
    warnings: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Of all frames, [T, H, W, 3]."""
        return len(self.timestamps_s) * self.height * self.width * 3


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Child to pool: the caller's fault."""

    kind: str
    message: str
    param: str | None

    @classmethod
    def of(cls, error: RequestError) -> Refused:
        return cls(kind=type(error).__name__, message=error.message, param=error.param)

    def error(self) -> RequestError:
        """The exception again; KeyError for a name outside the table."""
        return _ERRORS[self.kind](self.message, param=self.param)


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """Child to pool: our fault; `detail` is a traceback for the log and never for a client."""

    detail: str


Answer = Decoded | Refused | Broken


def encode(message: Job | Answer) -> bytes:
    return msgspec.json.encode(message)


def decode_job(data: bytes) -> Job:
    return msgspec.json.decode(data, type=Job)


def decode_answer(data: bytes) -> Answer:
    """Raises ValueError (msgspec's subclass of it) for anything but an answer."""
    answer: Answer = msgspec.json.decode(data, type=Answer)
    return answer
