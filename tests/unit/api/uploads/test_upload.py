"""Bytes from clients: counted, checked by signature, private, and deleted after any failure."""

from __future__ import annotations

import asyncio
import base64
import os
import resource
import stat
import threading
from collections.abc import AsyncIterator
from io import FileIO
from pathlib import Path

import pytest

from tests.unit.api.limits.test_deadline import run
from tests.unit.api.limits.test_fair_queue import settle
from vidspec_service.api.errors import UploadTimeout
from vidspec_service.api.uploads import upload as module
from vidspec_service.api.uploads.data_urls import DataUrl
from vidspec_service.api.uploads.upload import MIN_RATE, _enforce_min_rate, write_upload
from vidspec_service.errors import (
    CapacityError,
    InvalidRequest,
    ServiceError,
    VideoTooLarge,
    VideoUnreadable,
    VideoUnsupported,
)

HEAD = b"\x00\x00\x00\x20ftypisom"
CONTENT = HEAD + bytes(range(256)) * 9000  # more than one write


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def write(directory: Path, *chunks: bytes, max_bytes: int = 10_000_000) -> Path:
    return asyncio.run(write_upload(stream(*chunks), directory, max_bytes)).path


def test_what_comes_in_is_what_lies_on_disk_for_nobody_else(tmp_path: Path) -> None:
    chunks = [CONTENT[i : i + 65_536] for i in range(0, len(CONTENT), 65_536)]
    path = write(tmp_path, *chunks, max_bytes=len(CONTENT))
    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.suffix == ""  # FFmpeg must not guess from a name


def test_a_head_that_comes_byte_by_byte_is_still_checked(tmp_path: Path) -> None:
    assert write(tmp_path, *(bytes([byte]) for byte in HEAD)).read_bytes() == HEAD


@pytest.mark.parametrize(
    ("chunks", "error", "words"),
    [
        ([], VideoUnreadable, "empty"),
        ([b"", b""], VideoUnreadable, "empty"),
        ([b"hello " * 200], VideoUnsupported, "text"),
        ([b"\x89PNG"], VideoUnsupported, "PNG"),
        ([HEAD, bytes(2000), b"x"], VideoTooLarge, "limit is 2,012 bytes .VIDSPEC_MAX_UPLOAD_BYTES."),
    ],
)
def test_refusals_leave_no_file(tmp_path: Path, chunks: list[bytes], error: type[ServiceError], words: str) -> None:
    with pytest.raises(error, match=words):
        write(tmp_path, *chunks, max_bytes=2012)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_head_is_refused_before_the_rest_is_read(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"#EXTM3U\n" * 512
        raise AssertionError("read on")

    with pytest.raises(VideoUnsupported, match="playlist"):
        asyncio.run(write_upload(endless(), tmp_path, 10_000_000))


def test_a_file_is_written_while_it_arrives_and_not_held_in_memory(tmp_path: Path) -> None:
    num_written: list[int] = []

    def look() -> None:
        num_written.extend(path.stat().st_size for path in tmp_path.iterdir())

    async def watched() -> AsyncIterator[bytes]:
        yield CONTENT
        look()

    asyncio.run(write_upload(watched(), tmp_path, len(CONTENT)))
    assert num_written == [len(CONTENT)]


def test_a_file_that_somebody_has_cleared_away_changes_no_refusal(tmp_path: Path) -> None:
    def clear() -> None:
        (file,) = tmp_path.iterdir()
        file.unlink()

    async def cleared() -> AsyncIterator[bytes]:
        clear()
        yield b"#EXTM3U\n" * 512

    with pytest.raises(VideoUnsupported):
        asyncio.run(write_upload(cleared(), tmp_path, 10_000_000))


def test_a_client_that_goes_away_leaves_no_file(tmp_path: Path) -> None:
    async def leave() -> None:
        is_stored = asyncio.Event()

        async def stalled() -> AsyncIterator[bytes]:
            yield CONTENT
            is_stored.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(write_upload(stalled(), tmp_path, 10_000_000))
        await is_stored.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_to_its_end_before_it_is_closed_however_often_its_request_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to fetch a video is up, then its client leaves, while the disk hangs."""
    has_begun, may_go_on = threading.Event(), threading.Event()
    were_closed: list[bool] = []

    def slow(file: FileIO, data: bytes) -> None:
        has_begun.set()
        may_go_on.wait(20)
        were_closed.append(file.closed)

    monkeypatch.setattr(module, "_write_through", slow)

    async def end_twice() -> None:
        task = asyncio.create_task(write_upload(stream(CONTENT), tmp_path, 10_000_000))
        await asyncio.to_thread(has_begun.wait, 20)
        for _ in range(2):
            task.cancel()
            await settle()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(end_twice())
    assert were_closed == [False]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written_is_not_the_clients_fault(tmp_path: Path) -> None:
    with pytest.raises(CapacityError):
        write(tmp_path / "gone", CONTENT)


def test_a_disk_that_is_full_is_told_with_the_folder_and_its_setting(tmp_path: Path) -> None:
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) // 2, most[1]))
    try:
        with pytest.raises(CapacityError) as caught:
            write(tmp_path, CONTENT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.strerror == f"File too large: {tmp_path} (upload_dir)"
    assert list(tmp_path.iterdir()) == []


def decode_data_url(url: str, max_bytes: int, *, is_still: bool = False) -> bytes:
    async def decoded() -> bytes:
        return b"".join([piece async for piece in DataUrl.of(url).decoded(max_bytes, is_still=is_still)])

    return asyncio.run(decoded())


@pytest.mark.parametrize(
    "media_type",
    [
        "video/mp4", "VIDEO/WEBM", "video/x-msvideo", "video/mp4;codecs=avc1",
        f"video/mp4;codecs={'x' * 200}",
        "video/webm;codecs=vp8,opus", 'video/mp4;codecs="avc1.64001f, mp4a.40.2"',  # as browsers record
    ],
)  # fmt: skip
@pytest.mark.parametrize("length", [0, 1, 2, 3, 1000])
def test_a_data_url_gives_its_bytes_up_to_the_limit_exactly(media_type: str, length: int) -> None:
    content = os.urandom(length)
    url = f"data:{media_type};base64,{base64.b64encode(content).decode()}"
    assert decode_data_url(url, length) == content
    if length:
        with pytest.raises(VideoTooLarge, match="VIDSPEC_MAX_UPLOAD_BYTES"):
            decode_data_url(url, length - 1)


def test_a_long_data_url_is_decoded_whole_and_padding_inside_it_is_refused() -> None:
    content = os.urandom(5_000_001)
    text = base64.b64encode(content).decode()
    assert decode_data_url(f"data:video/mp4;base64,{text}", len(content)) == content
    for place in (1024 * 1024 - 2, 1024 * 1024 + 2):
        with pytest.raises(InvalidRequest, match="malformed"):
            decode_data_url(f"data:video/mp4;base64,{text[:place]}=={text[place + 2 :]}", len(content))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_an_image_and_a_video_each_need_their_own_media_type(kind: str) -> None:
    url = f"data:{kind}/x-any;base64,AAAA"
    assert decode_data_url(url, 3, is_still=kind == "image") == bytes(3)
    with pytest.raises(InvalidRequest, match="must be a URL that starts with data:"):
        decode_data_url(url, 3, is_still=kind != "image")


def test_wrapped_base64_is_told_what_is_wrong() -> None:
    """`base64` on a command line breaks lines after 76 characters."""
    with pytest.raises(InvalidRequest, match="base64 is malformed: it must be padded, without line breaks"):
        decode_data_url(f"data:video/mp4;base64,{base64.encodebytes(bytes(100)).decode()}", 1000)


@pytest.mark.parametrize("media_type", ["application/octet-stream", "application/pdf"])
def test_the_bytes_decide_where_a_client_does_not_know_the_media_type(media_type: str) -> None:
    for is_still in (False, True):
        assert decode_data_url(f"data:{media_type};base64,AAAA", 3, is_still=is_still) == bytes(3)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "https://example.com/a.mp4",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "data:text/plain;base64,AAAA",
        "data:video/mp4,AAAA",
        "data:video/mp4;base64",
        "data:video/mp4;base64,A",
        "data:video/mp4;base64,AA=A",
        "data:video/mp4;base64,AA AA",
        "data:video/mp4;base64,ÄÄÄÄ",
        "data:video/jpeg;base64,AAAA,BBBB",
        "data:video/mp4;" + "a=b;" * 100 + "base64,AAAA",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_data_url(url, 1000)
    assert caught.value.param == "video"


@pytest.mark.parametrize(("rate", "num_seconds"), [(MIN_RATE, 100), (MIN_RATE * 3 // 4, 37)])
def test_a_body_may_take_long_but_not_fall_far_behind_the_slowest_rate(rate: int, num_seconds: int) -> None:
    async def steady() -> AsyncIterator[bytes]:
        for _ in range(100):
            await asyncio.sleep(1)
            yield bytes(rate)

    async def scenario() -> int:
        num_chunks = 0
        try:
            async for _ in _enforce_min_rate(steady()):
                num_chunks += 1
        except UploadTimeout:
            assert rate < MIN_RATE
        return num_chunks

    assert run(scenario()) == pytest.approx(num_seconds, abs=1)
