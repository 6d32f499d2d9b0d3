"""The pool's end of one decode child: start it, give it its one job, turn its answer into a Clip, end it.

Blocking calls throughout, for the pool's threads; only `kill` may be called from elsewhere, at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from time import monotonic

import numpy as np

from vidspec_service.decoding.clip import Clip
from vidspec_service.decoding.messages import Answer, Broken, Job, Refused, decode_answer, encode
from vidspec_service.decoding.sandbox import Missing
from vidspec_service.errors import ServiceError, VideoUnreadable

_MAX_ANSWER_BYTES = 16 * 1024 * 1024
# Nobody, not even a descendant that slipped out of the group, can now change what the mapping shows.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_LAST_WORD_S = 0.05  # a child that has answered, or crashed, is gone in less; how it ended is worth knowing

_log = logging.getLogger(__name__)


class DecodeChild:
    """One process, one clip, in a process group of its own: `start`, then `decode` or `end`."""

    def __init__(self) -> None:
        self.missing = Missing(0)  # of its confinement; known once it has started
        self._lock = threading.Lock()  # a reaped pid may be another's: signal and reap never overlap
        self._is_killed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def start(self, timeout_s: float) -> None:
        """Spawn and wait until it is ready for a job. ServiceError if that fails."""
        try:
            self._spawn()
            assert self._channel is not None
            self._channel.settimeout(timeout_s)
            ready = self._channel.recv(1)
            if not ready:
                raise ServiceError("a decode child ended before it was ready")
            self.missing = Missing(ready[0])
        except OSError as error:  # no process or memory to be had, or no answer in time
            self.end()
            raise ServiceError(f"a decode child does not start: {type(error).__name__}") from error
        except ServiceError:
            self.end()
            raise

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            self._channel = ours
            if self._is_killed:
                raise ServiceError("the decode pool is closed")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vidspec_service.decoding.child", str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Nothing of ours: no keys to steal. One thread for what numpy brings.
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """Whether a spare is still there to take a job."""
        with self._lock:
            return self._process is not None and not self._is_killed and self._process.poll() is None

    def decode(self, job: Job) -> Clip:
        """Run the job and end the child. Raises what `read_clip` does; VideoUnreadable if it is lost."""
        try:
            data, descriptor = self._ask(encode(job), monotonic() + job.limits.timeout_s)
        except TimeoutError:
            _log.warning("decode child timed out", extra={"timeout_s": job.limits.timeout_s})
            limit = f"{job.limits.timeout_s:g} s (VIDSPEC_DECODE_TIMEOUT_S)"
            raise VideoUnreadable(f"Decoding did not end within {limit}.", param="video") from None
        except OSError:  # it died before it had read the job
            data, descriptor = b"", None
        finally:
            returncode = self.end()  # before its memory is looked at: now nobody else can change it
        try:
            return _clip(decode_answer(data), descriptor)
        except (KeyError, OSError, ValueError):  # no answer, or none that holds together
            _log.warning("decode child lost", extra={"returncode": returncode})
            raise VideoUnreadable("The video made its decoder fail: it is damaged.", param="video") from None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _ask(self, job: bytes, deadline: float) -> tuple[bytes, int | None]:
        """The child's whole answer and the descriptor that came with it; empty if it died."""
        assert self._channel is not None
        channel, answer, descriptors = self._channel, bytearray(), list[int]()
        try:
            channel.settimeout(max(deadline - monotonic(), 0.001))
            channel.sendall(job)
            channel.shutdown(socket.SHUT_WR)
            while len(answer) <= _MAX_ANSWER_BYTES:
                channel.settimeout(max(deadline - monotonic(), 0.001))
                part, received, _, _ = socket.recv_fds(channel, 65536, 1, socket.MSG_CMSG_CLOEXEC)
                descriptors += received
                if not part:
                    break
                answer += part
        except OSError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        for extra in descriptors[1:]:
            os.close(extra)
        return bytes(answer), descriptors[0] if descriptors else None

    def kill(self) -> None:
        """Stop whatever it does, from any thread; who waits for it sees it die. Never blocks for long."""
        with self._lock:
            self._is_killed = True
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int | None:
        """Kill the group, reap, free. Its return code: negative for the signal that ended it."""
        with self._lock:
            process, channel = self._process, self._channel
        if channel is not None:
            channel.close()
        if process is None:
            return None
        if process.returncode is None:
            _wait_unreaped(process.pid, _LAST_WORD_S)
            self.kill()
        with self._lock:
            return process.wait()


def _wait_unreaped(pid: int, timeout_s: float) -> None:
    """Wait for our own child's end and leave its status, and so its pid and group, in place."""
    try:
        pid_descriptor = os.pidfd_open(pid)
    except OSError:  # no descriptor is left; it ends without last words
        return
    try:
        poll = select.poll()  # `select` itself takes no descriptor above 1023, which a thousand connections use up
        poll.register(pid_descriptor, select.POLLIN)
        poll.poll(1000 * timeout_s)
    finally:
        os.close(pid_descriptor)


def _clip(answer: Answer, descriptor: int | None) -> Clip:
    """The clip, its frames mapped read-only and freed with the array; or the error that the answer is."""
    if isinstance(answer, Refused):
        raise answer.error()
    if isinstance(answer, Broken):
        _log.error("decode child failed", extra={"detail": answer.detail})
        raise VideoUnreadable("The video cannot be decoded.", param="video")
    num_frames = len(answer.timestamps_s)
    if descriptor is None or len(answer.source_indices) != num_frames:
        raise ValueError("frames are missing")
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    if os.fstat(descriptor).st_size != answer.num_bytes:
        raise ValueError("the frames are not of the stated shape")
    # Private, since kernels before 6.7 refuse shared mappings of sealed memory; nothing is copied.
    mapping = mmap.mmap(descriptor, answer.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    frames = np.frombuffer(mapping, np.uint8).reshape(num_frames, answer.height, answer.width, 3)
    return Clip(
        frames=frames,
        timestamps_s=answer.timestamps_s,
        source_indices=answer.source_indices,
        source_fps=answer.source_fps,
        source_num_frames=answer.source_num_frames,
        duration_s=answer.duration_s,
        width=answer.width,
        height=answer.height,
        codec=answer.codec,
        warnings=answer.warnings,
    )
