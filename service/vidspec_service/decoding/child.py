"""A decode child's whole life: give up privileges, say ready, take one job, close itself in, answer, end.

Standard input is its socket to the pool. The frames go into anonymous memory whose descriptor is passed with
the answer: nothing has a name, so nothing can be left behind however the child ends. Imports neither torch nor numpy;
whatever it needs is imported before it closes itself in, since it cannot open a file afterwards.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import traceback

from vidspec_service.decoding.messages import Answer, Broken, Job, Refused, decode_job, encode
from vidspec_service.decoding.sandbox import Missing, close_in, give_up_privileges, limit_resources
from vidspec_service.errors import RequestError

_NICENESS = 5  # as the workers': HTTP and health checks go first


def main() -> None:
    """`python -m vidspec_service.decoding.child PARENT_PID`, as `child_process` starts it."""
    os.nice(_NICENESS)
    missing = give_up_privileges(parent_pid=int(sys.argv[1]))
    # Preloads PyAV, the slow part of starting, while nobody waits.
    from vidspec_service.decoding.reader.opening import is_ffmpeg_fixed

    if not is_ffmpeg_fixed():
        missing |= Missing.FIXED_FFMPEG
    with socket.socket(fileno=sys.stdin.fileno()) as channel:
        channel.sendall(bytes([missing]))  # ready; and what the kernel refused
        data = _receive_all(channel)
        if data:  # else the pool has closed and this spare is not needed
            frames = _Frames()
            answer = _work(decode_job(data), frames)
            _send(channel, encode(answer), frames.descriptor)
    os._exit(0)  # at once: the pool waits for the end, and there is nothing to tidy up


def _work(job: Job, frames: _Frames) -> Answer:
    from vidspec_service.decoding.reader import read_clip

    limit_resources(job.limits)
    try:
        with open(job.path, "rb", buffering=0) as file:
            close_in()  # before its first byte is read
            decoded = read_clip(
                file, job.request, job.limits, frames.allocate, default_num_frames=job.default_num_frames
            )
    except RequestError as error:
        return Refused.of(error)
    except Exception:
        return Broken(detail=traceback.format_exc())
    frames.trim(decoded.num_bytes)
    return decoded


class _Frames:
    """Anonymous memory for the pixels, mapped here and later by the pool."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._mapping: mmap.mmap | None = None

    def allocate(self, num_bytes: int) -> memoryview:
        self.descriptor = os.memfd_create("frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, num_bytes)
        self._mapping = mmap.mmap(self.descriptor, num_bytes)
        return memoryview(self._mapping)

    def trim(self, num_bytes: int) -> None:
        """Fewer frames came out than were chosen."""
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, num_bytes)


def _receive_all(channel: socket.socket) -> bytes:
    """Up to the end of what the pool sends; it closes its sending side after the job."""
    parts = []
    while part := channel.recv(65536):
        parts.append(part)
    return b"".join(parts)


def _send(channel: socket.socket, data: bytes, descriptor: int | None) -> None:
    sent = socket.send_fds(channel, [data], [] if descriptor is None else [descriptor])
    channel.sendall(data[sent:])


if __name__ == "__main__":
    main()
