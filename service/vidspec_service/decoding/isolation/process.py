"""The pool's side of one decode child: start it, give it its one job, end it, and check its answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import signal
import socket
from io import FileIO
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from vidspec_models.request import Video
from vidspec_service.decoding.clip import Clip, Decoded, DecodingLimits
from vidspec_service.decoding.isolation.fork_server import DecodeJob, DecodeResult
from vidspec_service.decoding.isolation.sandbox import MissingProtection
from vidspec_service.errors import (
    CapacityError,
    DecoderLost,
    InvalidRequest,
    RequestError,
    ServiceError,
    VideoTooLarge,
    VideoUnreadable,
    VideoUnsupported,
)
from vidspec_service.forking import ForkServer
from vidspec_service.shared_frames import SharedFrames

_EXIT_REPORT_TIMEOUT_S = 10.0  # for the fork server to report that a process has ended; only a stalled machine needs it
_ANSWER_BYTES, _ANSWER_BYTES_PER_FRAME = 64 * 1024, 64  # at most: reading 16 MB of lies held up all answers for 1.3 s
_ERRORS: dict[str, type[RequestError]] = {
    error.__name__: error for error in (InvalidRequest, VideoTooLarge, VideoUnreadable, VideoUnsupported)
}
_MEMFD = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING

_MAX_UNEVEN_S = 0.05  # models write times in tenths of a second
_TICKS_PER_S = 1000.0
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # our own lack: nothing is wrong with the video

_log = logging.getLogger(__name__)


class ForkServerLost(Exception):
    """The fork server died, and the child with it: that says nothing about the video."""


class DecodeChild:
    """One process, one clip, in a process group of its own: `start`, then `decode` or `end`; `kill` any time after."""

    def __init__(self, forks: ForkServer) -> None:
        self._forks = forks
        self._is_killed = False
        self._held = contextlib.ExitStack()  # our ends of its sockets
        self._life: socket.socket | None = None  # set while the child can be killed

    async def start(self, timeout_s: float) -> None:
        """Have it forked and wait until it is ready for a job. Raises ServiceError if that fails."""
        try:
            self._fork()
            async with asyncio.timeout(timeout_s):
                ready = await asyncio.get_running_loop().sock_recv(self._channel, 1)
            if not ready:
                raise ConnectionAbortedError
        except OSError as error:  # no process or memory, no answer in time, or the child has ended
            await self.end()
            raise ServiceError(f"a decode child does not start: {error!r}") from error
        self.missing = MissingProtection(ready[0])  # protection that it lacks

    def _fork(self) -> None:
        self._channel, its_channel = self._pair()
        with its_channel:
            self._life, its_life = self._pair()
            with its_life:
                self._forks.launch(its_channel.fileno(), its_life.fileno())

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        ours, its = socket.socketpair()
        self._held.enter_context(ours).setblocking(False)
        return ours, its

    @property
    def is_alive(self) -> bool:
        """Whether a spare can still take a job: until it has one, its socket is readable only if it has ended."""
        news = select.poll()
        news.register(self._channel, select.POLLIN)
        return not news.poll(0)

    async def decode(self, job: DecodeJob, frames: FileIO) -> DecodeResult:
        """Run the job, whose pixels go into `frames`, and end the child; returns its answer, not yet checked.

        Raises DecoderLost if the child is lost, CapacityError if for lack of memory, ForkServerLost if the fork server
        is. Must not be cancelled.
        """
        data = b""
        with self._held:
            try:
                async with asyncio.timeout(job.limits.timeout_s):
                    data = await self._ask(job, frames)
            except TimeoutError:
                _log.warning("decode child timed out", extra={"timeout_s": job.limits.timeout_s})
                limit = f"{job.limits.timeout_s:g} s (VIDSPEC_DECODE_TIMEOUT_S)"
                raise DecoderLost(f"Decoding did not end within {limit}.", param="video") from None
            except OSError:  # it died before it had read the job
                pass
            finally:
                was_killed = self._is_killed  # by us: its client has left, or the server ends
                returncode = await self._wait()  # before `frames` is read: from here on nobody else can change it
        if returncode is not None:
            with contextlib.suppress(ValueError, RecursionError):  # no answer, or an invalid one
                answer: DecodeResult = msgspec.json.decode(data, type=DecodeResult)
                return answer
        if not was_killed:
            _log.warning("decode child lost", extra={"returncode": returncode})
            if returncode is None:
                raise ForkServerLost
            if returncode == -signal.SIGKILL and not data:  # by the kernel, which takes decoders first
                raise CapacityError("The server ran out of memory while it decoded the video; try again.")
        raise decoder_lost()

    async def _ask(self, job: DecodeJob, frames: FileIO) -> bytes:
        """The child's answer, whole unless it is longer than an honest one; empty if it died."""
        loop = asyncio.get_running_loop()
        encoded, most = msgspec.json.encode(job), _ANSWER_BYTES + job.limits.max_frames * _ANSWER_BYTES_PER_FRAME
        sent = socket.send_fds(self._channel, [encoded], [frames.fileno()])
        await loop.sock_sendall(self._channel, encoded[sent:])
        self._channel.shutdown(socket.SHUT_WR)
        answer = bytearray()
        while len(answer) <= most:
            part = await loop.sock_recv(self._channel, 65536)
            if not part:
                break
            answer += part
        return bytes(answer)

    def kill(self) -> None:
        """Kill the child, whatever it does; a `start` or `decode` that waits for it sees its end."""
        self._is_killed = True
        if self._life is not None:
            self._life.shutdown(socket.SHUT_WR)
            self._channel.shutdown(socket.SHUT_RDWR)  # who waits there need not wait for a fork server that hangs

    async def end(self) -> None:
        """Kill the child, wait for its end, close the sockets; may be called again, also meanwhile."""
        with self._held.pop_all():  # only the first closes what it reads
            await self._wait()

    async def _wait(self) -> int | None:
        """Kill the child, wait for its end, return its exit code: negative for a signal, None if there is none.

        A child that has crashed keeps its own code: a later signal does not change an exit under way.
        """
        self.kill()
        life, self._life = self._life, None
        if life is None:
            return None
        try:
            async with asyncio.timeout(_EXIT_REPORT_TIMEOUT_S):
                code = await asyncio.get_running_loop().sock_recv(life, 64)
        except TimeoutError:
            self._forks.restart()  # the fork server hangs; its children die with it
            return None
        return int(code) if code else None


def frames_memory() -> FileIO:
    """Anonymous memory for a clip's frames. Raises CapacityError if there is none."""
    try:
        return FileIO(os.memfd_create("frames", _MEMFD), "r+")
    except OSError as error:
        raise _no_room() from error


def decoded_of(answer: DecodeResult) -> Decoded:
    """What a child has decoded; raises the error if its answer is one. A fault of ours is logged."""
    if isinstance(answer, Decoded):
        return answer
    if answer.kind in _ERRORS:
        raise _ERRORS[answer.kind](answer.message, param=answer.param)
    # A fault of ours, or a name outside the table, which is a lie: the client gets no details.
    _log.error("decode child failed", extra={"detail": answer.message})
    raise DecoderLost("The video cannot be decoded.", param="video")


def clip_of(decoded: Decoded, frames: FileIO, limits: DecodingLimits) -> Clip:
    """The clip, its frames mapped read-only and freed with the array; the children must have ended.

    Raises VideoUnreadable if the answer contradicts itself, the memory or the limits, CapacityError without memory.
    """
    shape = len(decoded.timestamps_s), decoded.height, decoded.width, 3
    try:
        if len(decoded.source_indices) != shape[0]:
            raise ValueError("there are other frames")
        if shape[0] > limits.max_frames or decoded.height * decoded.width > limits.max_frame_pixels:
            raise ValueError("there are more or larger frames than a child may choose")
        # Sealed: nobody, not even a descendant that slipped out of its group, can now change them.
        return clip_with(SharedFrames.sealed(frames.fileno(), shape), decoded)
    except (OSError, ValueError, ArithmeticError) as error:
        if isinstance(error, OSError) and error.errno in _NO_RESOURCES:
            raise _no_room() from error
        _log.warning("decode child lied")
        raise decoder_lost() from None


def clip_with(frames: NDArray[np.uint8], decoded: Decoded) -> Clip:
    """The clip that has these frames. Models' processors take a frame's index over the rate for its time.

    Where frames do not come evenly (screen recordings, phones) the model is told milliseconds for indices.
    """
    indices, fps, num_frames = decoded.source_indices, decoded.source_fps, decoded.source_num_frames
    if any(abs(i / fps - time_s) > _MAX_UNEVEN_S for i, time_s in zip(indices, decoded.timestamps_s, strict=True)):
        ticks = (int(time_s * _TICKS_PER_S + 0.5) for time_s in decoded.timestamps_s)
        indices = tuple(accumulate(ticks, lambda before, tick: max(before + 1, tick)))  # no two are equal
        fps, num_frames = _TICKS_PER_S, max(round(decoded.duration_s * _TICKS_PER_S), indices[-1] + 1)
    video = Video(
        frames=frames,
        source_indices=indices,
        source_fps=fps,
        source_num_frames=num_frames,
        duration_s=decoded.duration_s,
    )
    return Clip(**msgspec.structs.asdict(decoded), video=video)


def _no_room() -> CapacityError:
    return CapacityError("The server has no room for the video's frames; try again.")


def decoder_lost() -> DecoderLost:
    """The error for a request whose video ended its decoder."""
    return DecoderLost("The video is damaged: it made the decoder fail.", param="video")
