"""Videos as bytes from a client: refused early, counted while they come, kept in private files under our names."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from vidspec_service.decoding.limits import HEAD_BYTES, check_signature, over_limit
from vidspec_service.errors import CapacityError, InvalidRequest, VideoTooLarge, VideoUnreadable

_PREFIX = "upload-"
_WRITE_BYTES = 1024 * 1024  # per hop to a thread
_DATA_URL = re.compile(r"data:(video|image)/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
_NO_ROOM = "The server cannot store the video at the moment; try again."
_BASE64_SLICE = 1024 * 1024  # characters, a multiple of 4
_DATA_URL_HEAD = 256  # characters in which the comma must come


def decode_data_url(url: str, max_bytes: int, *, is_still: bool = False) -> bytes:
    """The bytes of a `data:video/...;base64,` (or `image/`) URL; its size is checked before anything is decoded.

    InvalidRequest for anything else, VideoTooLarge over `max_bytes`. Blocks: call it in a thread.
    """
    head = _DATA_URL.match(url, 0, _DATA_URL_HEAD)
    kind = "image" if is_still else "video"
    if head is None or head[1].lower() != kind:
        raise InvalidRequest(f"{kind} must be a URL that starts with data:{kind}/...;base64,", param="video")
    num_bytes = (len(url) - head.end()) * 3 // 4 - url.count("=", -2)
    if num_bytes > max_bytes:
        raise _too_large(f"The {kind} has {num_bytes:,} bytes", max_bytes)
    try:
        return _from_base64(url, head.end())
    except ValueError:  # not of its alphabet, or badly padded
        raise InvalidRequest(f"The {kind}'s base64 is malformed.", param="video") from None


def _from_base64(text: str, begin: int) -> bytes:
    """Slice by slice: each holds up every other thread, and 30 MB at once do so for 0.1 s."""
    content = bytearray()
    for start in range(begin, len(text), _BASE64_SLICE):
        piece = base64.b64decode(text[start : start + _BASE64_SLICE], validate=True)
        if start + _BASE64_SLICE < len(text) and len(piece) < _BASE64_SLICE * 3 // 4:
            raise ValueError("padding in the middle")
        content += piece
    return bytes(content)


async def write_upload(
    chunks: AsyncIterator[bytes], directory: Path, max_bytes: int, *, is_still: bool = False
) -> Path:
    """Store a stream in a new private file in `directory` and give its path; the caller deletes it.

    VideoUnsupported as soon as the first bytes cannot be a video's (`is_still`: an image's), VideoTooLarge as soon
    as there are more than `max_bytes`, VideoUnreadable for none. On any error or cancellation the file is gone.
    """
    # The process id tells `sweep` whose it is; the rest nobody can guess. Nothing of the client's goes in.
    path = directory / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(16)}"
    try:
        await _write(chunks, path, max_bytes, is_still)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


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


async def _write(chunks: AsyncIterator[bytes], path: Path, max_bytes: int, is_still: bool) -> None:
    num_bytes, pending, is_checked = 0, bytearray(), False
    with _create(path) as file:
        async for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large("The video has more bytes", max_bytes)
            pending += chunk
            if not is_checked and len(pending) >= HEAD_BYTES:
                check_signature(bytes(pending[:HEAD_BYTES]), is_still=is_still)
                is_checked = True
            if len(pending) >= _WRITE_BYTES:
                await _write_in_thread(file, bytes(pending))
                pending.clear()
        if num_bytes == 0:
            raise VideoUnreadable("The video is empty.", param="video")
        if not is_checked:
            check_signature(bytes(pending), is_still=is_still)
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
