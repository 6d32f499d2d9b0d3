"""Payload: a request with its frames, or an array, in anonymous shared memory that is sent as file descriptors."""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vidspec_models.request import GenerationRequest, TowerOutput
from vidspec_service.engine.ipc.channel import MAX_FDS
from vidspec_service.engine.ipc.messages import Relevance
from vidspec_service.errors import CapacityError
from vidspec_service.shared_frames import SharedFrames, mapped

_LENGTH_BYTES = 8  # for the length of the encoded request, which comes first
_MAX_SHARED = MAX_FDS - 2  # clips of a request; two fds are for itself and its committed tokens. More clips are copied

Payload = tuple[int, ...]  # descriptors: of the request, then of frames that are not in it


def write_request(request: GenerationRequest) -> Payload:
    """Write a request to a new memfd, and list the memfds of its frames. The caller closes all of them.

    The encoded request has references in the places of its arrays; arrays without a memfd of their own follow it.
    """
    copied: list[NDArray[Any]] = []
    shared: list[int] = []

    def set_aside(array: object) -> object:
        assert isinstance(array, np.ndarray)
        if isinstance(array, SharedFrames) and array.descriptor is not None and len(shared) < _MAX_SHARED:
            shared.append(os.dup(array.descriptor))
            return len(shared), array.shape
        copied.append(array)
        return 0, array.shape

    try:
        encoded = msgspec.msgpack.Encoder(enc_hook=set_aside).encode(request)
        return _memfd("vidspec-request", len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded, *copied), *shared
    except BaseException:
        close_fds(shared)
        raise


async def payload_of(request: GenerationRequest) -> Payload:
    """`write_request` in a thread, since it may copy megabytes. Leaks no descriptor if it is cancelled.

    Raises CapacityError if the machine has no descriptor or memory left.
    """
    writing = asyncio.ensure_future(asyncio.to_thread(write_request, request))
    try:
        return await asyncio.shield(writing)
    except OSError as error:
        raise CapacityError("The server has no room for the request at the moment; try again.") from error
    except asyncio.CancelledError:
        writing.add_done_callback(lambda done: close_fds(() if done.cancelled() or done.exception() else done.result()))
        raise


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors: after the last `send` on the side that made them, after reading on the other."""
    for fd in fds:
        os.close(fd)


def read_request(payload: Sequence[int]) -> GenerationRequest:
    """Map a request; its frames are views that keep the mappings alive. Closes all descriptors."""
    try:
        memory = mmap.mmap(payload[0], 0, access=mmap.ACCESS_COPY)
        offset = end = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")

        def frames(_: type, reference: tuple[int, list[int]]) -> NDArray[np.uint8]:
            nonlocal offset
            number, shape = reference
            if number:
                return mapped(payload[number], tuple(shape))
            copied = np.frombuffer(memory, np.uint8, int(np.prod(shape)), offset).reshape(shape)
            offset += copied.nbytes
            return copied

        return msgspec.msgpack.decode(memory[_LENGTH_BYTES:end], type=GenerationRequest, dec_hook=frames)
    finally:
        close_fds(payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellScores:
    """The target's attention, as the draft gets it: one number for each video cell, of which the largest is 1."""

    request_id: str
    grid_checksum: int  # of the target's cells; the draft's may differ
    values: NDArray[np.float16]  # [C]


def write_ids(ids: Sequence[int]) -> int:
    """Write token ids to a new memfd: an answer may have more than fit into a message. The caller closes it."""
    return _memfd("vidspec-ids", np.array(ids, np.int32))


def read_ids(fd: int) -> tuple[int, ...]:
    """Read what `write_ids` wrote; closes `fd`."""
    return tuple(_read_array(fd, np.dtype(np.int32)).tolist())


def write_scores(values: NDArray[np.float16]) -> int:
    """Write scores to a new memfd: they are too large for a channel, which must never fill up. The caller closes it."""
    return _memfd("vidspec-relevance", values)


def read_scores(message: Relevance, fd: int) -> CellScores:
    """Read on the draft's side what `write_scores` wrote; closes `fd`."""
    values = _read_array(fd, np.dtype(np.float16))
    return CellScores(request_id=message.request_id, grid_checksum=message.grid_checksum, values=values)


class TowerMemory:
    """A vision tower's output for a request's videos, in shared memory that is freed with its last holder."""

    def __init__(self, descriptor: int) -> None:
        """Takes ownership of the descriptor."""
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, tower: Sequence[TowerOutput]) -> TowerMemory:
        """Copy the output to new shared memory. Raises OSError if the machine has no room for it."""
        encoded = msgspec.msgpack.Encoder(enc_hook=np.shape).encode(tower)
        length = len(encoded).to_bytes(_LENGTH_BYTES, "little")
        return cls(_memfd("vidspec-tower", length, encoded, *(video.rows for video in tower)))

    def read(self) -> list[TowerOutput]:
        """Returns a copy. Raises OSError."""
        memory = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        offset = end = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")

        def rows(_: type, shape: list[int]) -> NDArray[np.float32]:
            nonlocal offset
            copied = np.frombuffer(memory, np.float32, math.prod(shape), offset).reshape(shape).copy()
            offset += copied.nbytes
            return copied

        return msgspec.msgpack.decode(memory[_LENGTH_BYTES:end], type=list[TowerOutput], dec_hook=rows)


def _read_array(fd: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)  # the descriptors share a position, which writing has moved
        return np.frombuffer(file.read(), dtype)


def _memfd(name: str, *parts: bytes | NDArray[Any]) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            for part in parts:
                file.write(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
    except BaseException:
        os.close(fd)
        raise
    return fd
