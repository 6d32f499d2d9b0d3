"""A decode child that a hostile file controls: the kernel refuses what it tries, and the parent is told."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

import pytest

from tests.clips import bar_codes, write_video
from tests.component.decoding.processes import fork_children_with
from vidspec_service.decoding.clip import DecodingLimits, FrameRequest
from vidspec_service.decoding.isolation import sandbox
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.errors import ConfigError, InvalidRequest, VideoUnreadable

needs_filter = pytest.mark.skipif(not sandbox.is_filter_supported(), reason="this kernel takes no syscall filters")

# Runs in place of the reader, as if a file had made FFmpeg run foreign code.
TAKEN_OVER = """
import ctypes, fcntl, json, mmap, os, resource, shutil, socket, subprocess, threading
from vidspec_service.errors import InvalidRequest

def attempts(secret, folder, libc=ctypes.CDLL(None, use_errno=True)):
    def exploit(name, *arguments):
        if getattr(libc, name)(*arguments) == -1:
            raise OSError(ctypes.get_errno(), name)
    yield "read a file", lambda: open(secret).read()
    yield "ask for a file", lambda: os.stat(secret)
    yield "list a folder", lambda: os.listdir(folder)
    yield "write a file", lambda: open(folder + "/left-behind", "w")
    yield "delete a file", lambda: os.unlink(secret)
    yield "link a file", lambda: os.symlink(secret, folder + "/link")
    yield "read its own memory map", lambda: open("/proc/self/maps").read()
    yield "open an internet socket", lambda: socket.socket(socket.AF_INET)
    yield "open a local socket", lambda: socket.socket(socket.AF_UNIX)
    yield "open a raw kernel socket", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
    yield "fork", os.fork
    yield "run a program", lambda: subprocess.run(["/bin/true"])
    yield "become a program", lambda: os.execv("/bin/true", ["true"])
    yield "signal its parent", lambda: os.kill(os.getppid(), 0)
    yield "stop its parent", lambda: exploit("kill", os.getpid() - 1, 0)
    yield "have the kernel signal its parent", lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid() - 1)
    yield "choose a signal for the kernel", lambda: fcntl.fcntl(0, fcntl.F_SETSIG, 9)
    yield "trace its parent", lambda: exploit("ptrace", 16, 1, 0, 0)
    yield "send a byte out of band", lambda: exploit("send", 0, b"!", 1, socket.MSG_OOB)
    yield "map code", lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    yield "map the first page, as root may", lambda: exploit("mmap", 0, 4096, 3, 0x32, -1, 0)
    yield "change its namespace", lambda: exploit("unshare", 0x10000000)
    yield "lift its limits", lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    yield "start a thread", lambda: threading.Thread(target=int).start()

def outcome(attempt):
    try:
        attempt()
    except (OSError, RuntimeError, ValueError) as error:
        return type(error).__name__
    return "done"

def read_clip(file, request, limits, write, shard):
    found = {{name: outcome(attempt) for name, attempt in attempts({secret!r}, {folder!r})}}
    found["read its video"] = file.read(8)[4:].decode()
    found["write a frame"] = write(bytes(4096), 0)
    raise InvalidRequest(json.dumps(found))

import vidspec_service.decoding.reader
vidspec_service.decoding.reader.read_clip = read_clip
"""
NO_FILTER = """
import vidspec_service.decoding.isolation.sandbox
vidspec_service.decoding.isolation.sandbox.is_filter_supported = lambda: False
"""
REFUSED_FILTER = """
import vidspec_service.decoding.isolation.sandbox
vidspec_service.decoding.isolation.sandbox.filter_program = lambda machine: bytes(8)
"""
REFUSED_CAPSET = """
import vidspec_service.decoding.isolation.sandbox
vidspec_service.decoding.isolation.sandbox._CAPABILITY_VERSION = 0
"""
OLD_FFMPEG = """
import vidspec_service.decoding.reader
vidspec_service.decoding.reader.is_ffmpeg_fixed = lambda: False
"""


@pytest.fixture
def clip_path(tmp_path: Path) -> Path:
    return write_video(tmp_path / "clip.mp4", bar_codes(12))


@needs_filter
def test_a_child_that_was_taken_over_reaches_no_file_network_or_process(
    tmp_path: Path, clip_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "outside"
    folder.mkdir()
    secret = folder / "secret"
    secret.write_text("of another request")
    fork_children_with(TAKEN_OVER.format(secret=str(secret), folder=str(folder)), tmp_path, monkeypatch)

    async def body() -> None:
        async with DecodePool(DecodingLimits(), 1) as pool:
            with pytest.raises(InvalidRequest) as caught:
                await pool.decode(clip_path, FrameRequest())
        found = json.loads(str(caught.value))
        assert (found.pop("read its video"), found.pop("write a frame")) == ("ftyp", 4096)
        assert found.pop("start a thread") == "RuntimeError"
        assert found.pop("lift its limits") == "ValueError"
        assert set(found.values()) == {"PermissionError"}, found
        assert len(found) == 22

    asyncio.run(body())
    assert os.listdir(folder) == ["secret"]


@needs_filter
def test_a_whole_decode_fits_into_the_allowed_calls(clip_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with DecodePool(DecodingLimits(), 1) as pool:
            assert len((await pool.decode(clip_path, FrameRequest())).video.frames) == 8

    asyncio.run(body())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_kernel_without_filters_still_decodes_and_the_operator_is_told(
    tmp_path: Path, clip_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fork_children_with(NO_FILTER, tmp_path, monkeypatch)

    async def body() -> None:
        async with DecodePool(DecodingLimits(), 2) as pool:
            assert len((await pool.decode(clip_path, FrameRequest())).video.frames) == 8

    asyncio.run(body())
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.message == "decode children are confined without"
    assert "SYSCALL_FILTER" in record.__dict__["missing"]


@needs_filter
@pytest.mark.parametrize(("refused", "what"), [(REFUSED_FILTER, "filter"), (REFUSED_CAPSET, "capabilities")])
def test_without_protection_that_every_kernel_gives_or_this_one_has_promised_nothing_is_decoded(
    tmp_path: Path,
    clip_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: str,
    what: str,
) -> None:
    fork_children_with(refused, tmp_path, monkeypatch)

    async def body() -> None:
        async with DecodePool(DecodingLimits(), 1) as pool:
            with pytest.raises(VideoUnreadable):
                await pool.decode(clip_path, FrameRequest())

    asyncio.run(body())
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"the {what} cannot be" in record.__dict__["detail"]


def test_an_ffmpeg_with_known_holes_is_a_start_up_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_children_with(OLD_FFMPEG, tmp_path, monkeypatch)

    async def body() -> None:
        with pytest.raises(ConfigError, match="known security holes"):
            async with DecodePool(DecodingLimits(), 1):
                pass

    asyncio.run(body())
