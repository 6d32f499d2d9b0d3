"""Videos as bytes from a client: refused early, counted while they come, kept in private files under our names."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from io import FileIO
from pathlib import Path

from vidspec_service.decoding.limits import over_limit
from vidspec_service.decoding.signatures import HEAD_BYTES, check_signature
from vidspec_service.errors import CapacityError, InvalidRequest, VideoTooLarge, VideoUnreadable

_PREFIX = "upload-"
_WRITE_BYTES = 1024 * 1024  # per hop to a thread
_DATA_URL = re.compile(r"data:video/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
_NO_ROOM = "The server cannot store the video at the moment; try again."
_DATA_URL_HEAD = 256  # characters in which the comma must come


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes of a `data:video/...;base64,` URL; its size is checked before anything is decoded.

    InvalidRequest for anything else, VideoTooLarge over `max_bytes`. Blocks: call it in a thread.
    """
    head = _DATA_URL.match(url, 0, _DATA_URL_HEAD)
    if head is None:
        raise InvalidRequest("video must be a URL that starts with data:video/...;base64,", param="video")
    num_bytes = (len(url) - head.end()) * 3 // 4 - url.count("=", -2)
    if num_bytes > max_bytes:
        raise _too_large(f"The video has {num_bytes:,} bytes", max_bytes)
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        raise InvalidRequest("The video's base64 is malformed.", param="video") from None


async def write_upload(chunks: AsyncIterator[bytes], directory: Path, max_bytes: int) -> Path:
    """Store a stream in a new private file in `directory` and give its path; the caller deletes it.

    VideoUnsupported as soon as the first bytes cannot be a video's, VideoTooLarge as soon as there are more than
    `max_bytes`, VideoUnreadable for none. On any error or cancellation the file is gone.
    """
    # The process id tells `sweep` whose it is; the rest nobody can guess. Nothing of the client's goes in.
    path = directory / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(16)}"
    try:
        await _write(chunks, path, max_bytes)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


@asynccontextmanager
async def stored_upload(chunks: AsyncIterator[bytes], directory: Path, max_bytes: int) -> AsyncIterator[Path]:
    """`write_upload` for the length of a block."""
    path = await write_upload(chunks, directory, max_bytes)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def sweep(directory: Path) -> int:
    """Delete what servers that are gone left in `directory`; call it before the first upload. How many there were."""
    num_deleted = 0
    for path in directory.glob(f"{_PREFIX}*"):
        if _belongs_to_another(path.name):
            continue
        with suppress(OSError):
            path.unlink()
            num_deleted += 1
    return num_deleted


def _belongs_to_another(name: str) -> bool:
    """Whether the process that wrote it still runs, and is not this one (which has written nothing yet)."""
    owner = name.removeprefix(_PREFIX).partition("-")[0]
    return owner.isdecimal() and int(owner) != os.getpid() and Path("/proc", owner).exists()


async def _write(chunks: AsyncIterator[bytes], path: Path, max_bytes: int) -> None:
    num_bytes, pending, is_checked = 0, bytearray(), False
    with _create(path) as file:
        async for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large("The video has more bytes", max_bytes)
            pending += chunk
            if not is_checked and len(pending) >= HEAD_BYTES:
                check_signature(bytes(pending[:HEAD_BYTES]))
                is_checked = True
            if len(pending) >= _WRITE_BYTES:
                await _write_in_thread(file, bytes(pending))
                pending.clear()
        if num_bytes == 0:
            raise VideoUnreadable("The video is empty.", param="video")
        if not is_checked:
            check_signature(bytes(pending))
        await _write_in_thread(file, bytes(pending))


def _create(path: Path) -> FileIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return open(os.open(path, flags, 0o600), "wb", buffering=0)
    except OSError as error:
        raise CapacityError(_NO_ROOM) from error


async def _write_in_thread(file: FileIO, data: bytes) -> None:
    writing = asyncio.ensure_future(asyncio.to_thread(_write_through, file, data))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing})  # the file must not be closed under the thread
        raise
    except OSError as error:
        raise CapacityError(_NO_ROOM) from error


def _write_through(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _too_large(fact: str, max_bytes: int) -> VideoTooLarge:
    return over_limit(fact, f"{max_bytes:,} bytes", "VIDSPEC_MAX_UPLOAD_BYTES")
