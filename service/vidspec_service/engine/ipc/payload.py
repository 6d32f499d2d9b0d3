"""Payload: a request, frames included, or an array in anonymous shared memory, handed over as one file descriptor.

Anonymous (memfd) memory has no name: it vanishes with its last holder, however that process ends.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vidspec_models.request import GenerationRequest
from vidspec_service.engine.ipc.messages import Relevance
from vidspec_service.errors import CapacityError

_LENGTH_BYTES = 8  # of the encoded request's length, which comes first


def write_request(request: GenerationRequest) -> int:
    """Into a new memfd: the request, its arrays' shapes in their places, then the arrays. The caller closes it."""
    arrays: list[NDArray[Any]] = []

    def set_aside(array: object) -> object:
        assert isinstance(array, np.ndarray)
        arrays.append(array)
        return array.shape

    encoded = msgspec.msgpack.Encoder(enc_hook=set_aside).encode(request)
    return _memfd("vidspec-request", len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded, *arrays)


async def payload_of(request: GenerationRequest) -> int:
    """`write_request` off the event loop: it copies megabytes. Cancelled or not, no descriptor is lost.

    Raises CapacityError where the machine has no descriptor or memory for it.
    """
    writing = asyncio.ensure_future(asyncio.to_thread(write_request, request))
    try:
        return await asyncio.shield(writing)
    except OSError as error:
        raise CapacityError("The server has no room for the request at the moment; try again.") from error
    except asyncio.CancelledError:
        writing.add_done_callback(lambda done: None if done.cancelled() else os.close(done.result()))
        raise


def read_request(fd: int) -> GenerationRequest:
    """Map a request; its frames are views that keep the mapping alive. Closes `fd`."""
    with os.fdopen(fd, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    offset = end = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")

    def view(_: type, shape: list[int]) -> NDArray[np.uint8]:
        nonlocal offset
        frames = np.frombuffer(memory, np.uint8, int(np.prod(shape)), offset).reshape(shape)
        offset += frames.nbytes
        return frames

    return msgspec.msgpack.decode(memory[_LENGTH_BYTES:end], type=GenerationRequest, dec_hook=view)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellScores:
    """What the target's text pays attention to: one number a video cell, the largest of them 1."""

    request_id: str
    grid_checksum: int  # of the target's cells; the draft's may be others
    values: NDArray[np.float16]  # [C]


def write_scores(scores: CellScores) -> int:
    """The values into a new memfd: too much for a channel, which must never fill up. The caller closes it."""
    return _memfd("vidspec-relevance", scores.values)


def read_scores(message: Relevance, fd: int) -> CellScores:
    """On the draft's side; closes `fd`."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)  # the descriptors share a position, which writing has moved
        values = np.frombuffer(file.read(), np.float16)
    return CellScores(request_id=message.request_id, grid_checksum=message.grid_checksum, values=values)


def _memfd(name: str, *parts: bytes | NDArray[Any]) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        for part in parts:
            file.write(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
    return fd
