"""The process that decode children are forked from, confined and with PyAV imported; and a child's whole life.

Started as `python -m vidspec_service.decoding.isolation.fork_server FD PARENT_PID`. Starting an interpreter and
importing PyAV takes 0.13 s of a core, often more than a short clip; here that is paid once (ADR 22). This process is
never near a client's bytes.

A child reports that it is ready, takes one job, installs the filter, answers and ends. Its standard input is its socket
to the pool. The job comes with anonymous memory for the frames, which becomes standard output: neither has a name, so
nothing can be left behind however the child ends. A JSON job comes in, a JSON answer goes out. Nothing is pickled, and
errors are sent by name: a child taken over by a hostile file can lie about a clip, but cannot make the service run or
show anything else. Imports neither torch nor numpy; all that a child needs is imported before the fork, since it cannot
open a file once the filter is installed.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import traceback
from functools import partial
from typing import NoReturn

import msgspec

from vidspec_service.decoding.clip import WHOLE, Decoded, DecodingLimits, FrameRequest, Shard
from vidspec_service.decoding.isolation.sandbox import (
    MissingProtection,
    give_up_capabilities,
    give_up_privileges,
    install_filter,
    limit_resources,
)
from vidspec_service.errors import RequestError
from vidspec_service.forking import MOST_OOM_SCORE, give_way, serve_forks, tie_to_parent

_CHANNEL, _FRAMES = 0, 1  # descriptors


class DecodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Pool to child."""

    path: bytes  # a file's name need not be text
    request: FrameRequest
    limits: DecodingLimits
    shard: Shard = WHOLE


class DecodeFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Child to pool: a RequestError by its class name, or a fault of ours."""

    kind: str  # "" for ours
    message: str  # for the client; for a fault of ours a traceback, for the log only
    param: str | None = None


DecodeResult = Decoded | DecodeFailed


def main(requests_fd: int, parent_pid: int) -> None:
    """Serve one pool."""
    give_way(MOST_OOM_SCORE)  # a video that fills the memory must not cost a worker
    missing = give_up_privileges()
    tie_to_parent(parent_pid)  # last: in a new user namespace the kernel forgets to end us with our parent
    # The slow part of a start, done once for all children.
    from vidspec_service.decoding.reader import is_ffmpeg_fixed, sequence  # noqa: F401

    if not is_ffmpeg_fixed():
        missing |= MissingProtection.FIXED_FFMPEG
    serve_forks(requests_fd, partial(_decode_one, missing))


def _decode_one(missing: MissingProtection, channel: int) -> NoReturn:
    """A child's life. `missing`: protection that this machine does not give."""
    try:
        _keep_only(channel)
        _serve(missing)
    finally:
        os._exit(0)  # at once: the pool waits for the end, and there is nothing to tidy up


def _keep_only(channel: int) -> None:
    """Make a process group of its own, and close what belongs to the server or to other children."""
    os.setsid()
    os.dup2(channel, _CHANNEL)
    os.closerange(_FRAMES + 2, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # 1 and 2 are /dev/null


def _serve(missing: MissingProtection) -> None:
    channel = socket.socket(fileno=_CHANNEL)
    channel.sendall(bytes([missing]))  # ready
    data, fds, *_ = socket.recv_fds(channel, 65536, 1)
    for frames in fds:
        os.dup2(frames, _FRAMES)
        os.close(frames)
    while more := channel.recv(65536):  # the pool closes its sending side after the job
        data += more
    if data:  # else the pool has closed and this spare is not needed
        answer = msgspec.json.encode(_work(msgspec.json.decode(data, type=DecodeJob)))
        os.write(_CHANNEL, answer)  # waits until all is written; `send` is refused, since it could do more


def _work(job: DecodeJob) -> DecodeResult:
    from vidspec_service.decoding.reader import read_clip
    from vidspec_service.decoding.reader.sequence import read_sequence

    request, limits = job.request, job.limits
    limit_resources(limits)
    try:
        with open(job.path, "rb", buffering=0) as file:
            give_up_capabilities()
            install_filter()  # before its first byte is read
            write = partial(os.pwrite, _FRAMES)
            if request.sequence is None:
                decoded = read_clip(file, request, limits, write, job.shard)
            else:
                decoded = read_sequence(file, request, limits, write)
        if job.shard == WHOLE:
            os.ftruncate(_FRAMES, decoded.num_bytes)  # fewer frames may have come out than at a first attempt
    except RequestError as error:
        return DecodeFailed(kind=type(error).__name__, message=error.message, param=error.param)
    except Exception:
        return DecodeFailed(kind="", message=traceback.format_exc())
    return decoded


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
