"""The pool: right clips from real children, and no leftovers whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import logging
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.api.world import until
from tests.clips import bar_codes, number_of, write_video
from tests.component.decoding.processes import children, decoders, gone, hanging_child
from vidspec_service.decoding import pool as pool_module
from vidspec_service.decoding.clip import Clip, DecodingLimits, FrameRequest
from vidspec_service.decoding.isolation import process
from vidspec_service.decoding.isolation.fork_server import DecodeJob, DecodeResult
from vidspec_service.decoding.isolation.process import DecodeChild
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.errors import (
    CapacityError,
    ConfigError,
    Draining,
    ServiceError,
    VideoTooLarge,
    VideoUnreadable,
    VideoUnsupported,
)
from vidspec_service.telemetry import request_id_var
from vidspec_service.telemetry.logs import JsonFormatter

pytestmark = pytest.mark.component

LIMITS = DecodingLimits()
FOUR = FrameRequest(num_frames=4)


@pytest.fixture
def clip_path(tmp_path: Path) -> Path:
    return write_video(tmp_path / "clip.mp4", bar_codes(40))


@pytest.fixture
def stalling_path(tmp_path: Path) -> Path:
    """A pipe without a writer, so that opening it blocks."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def run(body: Coroutine[Any, Any, None]) -> None:
    """Run `body`, then check that no child and no file descriptor is left."""
    gc.collect()
    before = os.listdir("/proc/self/fd")
    asyncio.run(body)
    gc.collect()
    assert children() == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_file_whose_path_is_no_text_is_decoded(clip_path: Path) -> None:
    """Names from older systems are bytes in another encoding than UTF-8; a folder for uploads may have one."""
    path = clip_path.rename(clip_path.with_name(os.fsdecode(b"caf\xe9.mp4")))

    async def scenario() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            clip = await pool.decode(path, FOUR)
            assert len(clip.video.frames) == 4

    run(scenario())


def test_a_clip_arrives_whole_and_read_only(clip_path: Path) -> None:
    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            clip = await pool.decode(clip_path, FrameRequest(fps=6))
        assert clip.video.source_indices == (0, 5, 10, 15, 20, 25, 30, 35)
        assert clip.video.frames.shape == (8, 64, 64, 3)
        assert clip.video.frames.dtype == np.uint8
        assert [number_of(frame) for frame in clip.video.frames] == list(clip.video.source_indices)
        assert clip.timestamps_s == tuple(i / 30 for i in clip.video.source_indices)
        assert (clip.width, clip.height, clip.codec) == (64, 64, "h264")
        assert (clip.video.source_num_frames, clip.video.duration_s, clip.video.source_fps) == (40, 40 / 30, 30.0)
        with pytest.raises(ValueError, match="read-only"):
            clip.video.frames[0, 0, 0, 0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            clip.video.frames.flags.writeable = True

    run(body())


def test_a_path_starts_from_the_working_folder(clip_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clip_path.parent)

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            assert len((await pool.decode(Path(clip_path.name), FOUR)).timestamps_s) == 4

    run(body())


def test_a_working_folder_that_was_deleted_since_the_start_is_not_needed(
    clip_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a server started in a release's folder, after the next release."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            (tmp_path / "gone").rmdir()
            assert len((await pool.decode(clip_path, FOUR)).timestamps_s) == 4

    run(body())


def test_a_closed_pool_starts_no_child_for_who_waits_for_one(
    clip_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it log an error that nobody has retrieved."""
    start, num_started, num_late = DecodeChild.start, 0, 0

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            (await pool._spares[0]).kill()  # so another is started for who asks

            async def slow(child: DecodeChild, timeout_s: float) -> None:
                nonlocal num_started, num_late
                num_started += 1
                num_late += pool._is_closed
                await start(child, timeout_s)
                await until(lambda: pool._is_closed)
                raise ServiceError("killed by the closing pool")

            monkeypatch.setattr(DecodeChild, "start", slow)
            waiting = asyncio.create_task(pool.decode(clip_path, FOUR))
            await until(lambda: num_started > 0 and not pool._spares)  # it waits for the new one, too
        with pytest.raises(CapacityError):
            await waiting
        assert num_late == 0

    run(body())
    assert [record.message for record in caplog.records] == []


def test_videos_of_one_request_share_the_default_number_of_frames(clip_path: Path) -> None:
    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            for num_sharing, num_frames in ((1, 8), (2, 4), (3, 2), (8, 1)):
                clip = await pool.decode(clip_path, FrameRequest(num_sharing=num_sharing))
                assert len(clip.video.frames) == num_frames
            asked = await pool.decode(clip_path, FrameRequest(num_sharing=2, num_frames=8))
            assert len(asked.video.frames) == 8

    run(body())


def test_a_clip_with_fewer_frames_than_were_chosen_arrives_whole(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mov", bar_codes(6), codec="mjpeg", pix_fmt="yuvj420p")
    content = path.read_bytes()
    pictures = [match.start() for match in re.finditer(b"\xff\xd8\xff", content)]
    lost = slice(pictures[2], pictures[3])
    path.write_bytes(content[: lost.start] + bytes(lost.stop - lost.start) + content[lost.stop :])

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            clip = await pool.decode(path, FrameRequest(num_frames=6))
        assert [number_of(frame) for frame in clip.video.frames] == [0, 1, 3, 4, 5]
        assert clip.warnings == ("1 of the 6 chosen frames cannot be decoded and are left out.",)

    run(body())


def test_thirty_decodes_good_and_bad_leave_nothing(tmp_path: Path, clip_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video " * 100)
    (tmp_path / "broken.mp4").write_bytes(clip_path.read_bytes()[:200])

    async def body() -> None:
        kept: list[Clip] = []
        async with DecodePool(LIMITS, 2) as pool:
            for _ in range(10):
                results = await asyncio.gather(
                    pool.decode(clip_path, FOUR),
                    pool.decode(tmp_path / "text.mp4", FOUR),
                    pool.decode(tmp_path / "broken.mp4", FOUR),
                    return_exceptions=True,
                )
                assert isinstance(results[0], Clip)
                assert isinstance(results[1], VideoUnsupported)
                assert isinstance(results[2], VideoUnreadable)
                kept.append(results[0])
            assert len(pool._spares) == 2, "as many wait as can work"
        assert all([number_of(frame) for frame in clip.video.frames] == [5, 15, 25, 35] for clip in kept)

    run(body())


def test_refusals_travel_with_their_words_and_field(clip_path: Path) -> None:
    async def body() -> None:
        async with DecodePool(replace(LIMITS, max_pixels=100), 1) as pool:
            with pytest.raises(VideoTooLarge, match="VIDSPEC_MAX_PIXELS") as too_large:
                await pool.decode(clip_path, FOUR)
            assert too_large.value.param == "video"
            with pytest.raises(VideoTooLarge) as too_many:  # is found without a child
                await pool.decode(Path("/nowhere"), FrameRequest(num_frames=LIMITS.max_frames + 1))
            assert too_many.value.param == "num_frames"

    run(body())


def test_a_decode_that_hangs_is_killed_at_its_limit_and_the_next_one_works(
    clip_path: Path, stalling_path: Path
) -> None:
    async def body() -> None:
        async with DecodePool(replace(LIMITS, timeout_s=0.5), 1) as pool:
            started = time.monotonic()
            ticks = asyncio.create_task(count_ticks())
            with pytest.raises(VideoUnreadable, match=r"within 0\.5 s \(VIDSPEC_DECODE_TIMEOUT_S\)"):
                await pool.decode(stalling_path, FOUR)
            assert 0.4 < time.monotonic() - started < 10
            ticks.cancel()
            assert await ticks >= 10  # the event loop kept running
            assert len(decoders()) == 1  # the spare
        async with DecodePool(LIMITS, 1) as pool:
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4

    run(body())


async def count_ticks() -> int:
    ticks = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(0.01)
            ticks += 1
    return ticks


@pytest.mark.parametrize("times", [1, 2])
def test_cancelling_kills_the_child_and_frees_the_slot_however_often(
    clip_path: Path, stalling_path: Path, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    """A cancelled decode logs no warning."""

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            task = asyncio.create_task(pool.decode(stalling_path, FOUR))
            hanging = await hanging_child()
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert hanging not in decoders()
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4
            gc.collect()  # unretrieved exceptions would be logged here
            await asyncio.sleep(0)

    run(body())
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_cancelling_one_that_waits_for_a_slot_costs_nothing(clip_path: Path, stalling_path: Path) -> None:
    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            running = asyncio.create_task(pool.decode(stalling_path, FOUR))
            await hanging_child()
            waiting = asyncio.create_task(pool.decode(clip_path, FOUR))
            await asyncio.sleep(0)
            waiting.cancel()
            running.cancel()
            await asyncio.gather(waiting, running, return_exceptions=True)
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4

    run(body())


def test_the_log_says_whose_video_a_lost_child_had(stalling_path: Path) -> None:
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setFormatter(JsonFormatter())

    async def body() -> None:
        request_id_var.set("r-1")
        async with DecodePool(LIMITS, 1) as pool:
            task = asyncio.create_task(pool.decode(stalling_path, FOUR))
            os.kill(await hanging_child(), signal.SIGKILL)
            with pytest.raises(CapacityError):
                await task

    logging.getLogger("vidspec_service.decoding").addHandler(handler)
    try:
        run(body())
    finally:
        logging.getLogger("vidspec_service.decoding").removeHandler(handler)
    (lost,) = (line for line in map(json.loads, log.getvalue().splitlines()) if line["event"] == "decode child lost")
    assert lost["request_id"] == "r-1"
    assert lost["returncode"] == -signal.SIGKILL


@pytest.mark.parametrize(
    ("death", "error", "message"),
    [
        (signal.SIGSEGV, VideoUnreadable, "made the decoder fail"),
        (signal.SIGKILL, CapacityError, "out of memory"),  # the kernel's way: it takes decoders first
    ],
)
def test_a_child_that_dies_by_a_signal_is_the_videos_fault_unless_it_was_killed(
    stalling_path: Path, death: signal.Signals, error: type[ServiceError], message: str
) -> None:
    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            task = asyncio.create_task(pool.decode(stalling_path, FOUR))
            os.kill(await hanging_child(), death)
            with pytest.raises(error, match=message):
                await task

    run(body())


def test_a_server_with_thousands_of_connections_still_decodes(clip_path: Path, stalling_path: Path) -> None:
    """`select` supports only descriptors below 1024: a thousand idle clients made every video a 500."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4
            task = asyncio.create_task(pool.decode(stalling_path, FOUR))
            os.kill(await hanging_child(), signal.SIGSEGV)
            with pytest.raises(VideoUnreadable, match="made the decoder fail"):
                await task

    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        run(body())


def test_a_spare_that_was_killed_is_replaced(clip_path: Path) -> None:
    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            (spare,) = decoders()
            os.kill(spare, signal.SIGKILL)
            await gone(spare)
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4
            (successor,) = pool._spares
            assert pool._children == {await successor}  # the dead one is forgotten

    run(body())


def test_a_child_that_ends_before_it_has_its_job_is_a_lost_one(
    clip_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = DecodeChild.decode

    async def too_late(child: DecodeChild, job: DecodeJob, frames: io.FileIO) -> DecodeResult:
        spare = decoders()[0]
        os.kill(spare, signal.SIGKILL)
        await gone(spare)
        return await decode(child, job, frames)

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            monkeypatch.setattr(DecodeChild, "decode", too_late)
            with pytest.raises(CapacityError):
                await pool.decode(clip_path, FOUR)
            monkeypatch.undo()
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4

    run(body())


def test_who_leaves_while_a_spare_starts_leaves_it_to_the_next(
    clip_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, may_start = DecodeChild.start, asyncio.Event()

    async def slow(child: DecodeChild, timeout_s: float) -> None:
        await may_start.wait()
        await start(child, timeout_s)

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            (await pool._spares[0]).kill()  # so another is started for who asks
            monkeypatch.setattr(DecodeChild, "start", slow)
            leaving = asyncio.create_task(pool.decode(clip_path, FOUR))
            await until(lambda: not pool._spares)
            leaving.cancel()
            await asyncio.wait({leaving}, timeout=10)
            may_start.set()
            assert leaving.cancelled()
            assert len(pool._spares) == 1
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4

    run(body())


def test_a_lost_fork_server_is_replaced(clip_path: Path, stalling_path: Path) -> None:
    """Its children die with it. A video is retried once; the next one is decoded even while children are dying."""

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            task = asyncio.create_task(pool.decode(stalling_path, FOUR))
            for _ in range(2):
                server = psutil.Process(await hanging_child()).parent()
                assert server is not None
                forked = decoders()
                server.kill()
                for pid in forked:
                    await gone(pid)
            with pytest.raises(CapacityError, match="lost twice"):
                await task
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4

    run(body())


def test_a_signal_to_all_processes_of_a_server_ends_no_decode(clip_path: Path) -> None:
    """As from a terminal: running requests, whose videos may not be decoded yet, are finished first."""

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            (spare,) = decoders()
            server = psutil.Process(spare).parent()
            assert server is not None
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                server.send_signal(number)
                os.kill(spare, number)
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4
            assert [psutil.Process(pid).parent() for pid in decoders()] == [server]

    run(body())


def test_a_fork_server_that_hangs_is_replaced_with_all_that_it_has_forked(
    clip_path: Path, stalling_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_EXIT_REPORT_TIMEOUT_S", 0.1)

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            task = asyncio.create_task(pool.decode(stalling_path, FOUR))
            hanging = await hanging_child()
            server = psutil.Process(hanging).parent()
            assert server is not None
            server.suspend()
            task.cancel()  # the child has much of its time left
            with pytest.raises(asyncio.CancelledError):
                async with asyncio.timeout(LIMITS.timeout_s / 2):
                    await task
            await gone(hanging)
            monkeypatch.undo()
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4

    run(body())


def test_who_leaves_while_spares_are_renewed_leaves_no_dead_ones(
    stalling_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        is_ending, may_end = asyncio.Event(), asyncio.Event()
        end = DecodePool._end

        async def end_later(pool: DecodePool, child: DecodeChild) -> None:
            is_ending.set()
            await may_end.wait()
            await end(pool, child)

        monkeypatch.setattr(DecodePool, "_end", end_later)
        async with DecodePool(LIMITS, 1) as pool:
            task = asyncio.create_task(pool.decode(stalling_path, FOUR))
            server = psutil.Process(await hanging_child()).parent()
            assert server is not None
            await asyncio.wait(pool._spares, timeout=30)  # one that has not started would not have to end
            server.kill()
            try:
                await asyncio.wait_for(is_ending.wait(), 30)
            except TimeoutError:
                may_end.set()  # or closing the pool would wait for it
                raise
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            may_end.set()
            (spare,) = pool._spares
            await spare
            await asyncio.gather(*pool._work)
            assert pool._children == {spare.result()}

    run(body())


def test_closing_ends_running_decodes_and_refuses_new_ones(clip_path: Path, stalling_path: Path) -> None:
    async def body() -> None:
        pool = DecodePool(replace(LIMITS, timeout_s=600), 2)
        async with pool:
            task = asyncio.create_task(pool.decode(stalling_path, FOUR))
            await until(lambda: len(pool._work) == 1)
        with pytest.raises(Draining):
            await task
        with pytest.raises(Draining):
            await pool.decode(clip_path, FOUR)
        await pool.close()

    run(body())


def test_a_child_may_be_ended_by_two_at_once(clip_path: Path) -> None:
    """By the pool that closes, and by who has found that the child is dead."""

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            child = await pool._take_spare()
            async with asyncio.timeout(5):
                await asyncio.gather(child.end(), child.end())
            assert len((await pool.decode(clip_path, FOUR)).video.frames) == 4

    run(body())


@pytest.mark.parametrize(
    ("what_starts", "is_left"), [("exit 1", False), ("exec sleep 60", False), ("exec sleep 60", True)]
)
def test_where_no_child_starts_the_service_does_not_either_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what_starts: str, is_left: bool
) -> None:
    """Whether children end, or hang, or whoever starts the service does not wait for that."""
    (interpreter := tmp_path / "interpreter").write_text(f"#!/bin/sh\n{what_starts}\n")
    interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(process, "_EXIT_REPORT_TIMEOUT_S", 0.1)
    if not is_left:
        monkeypatch.setattr(pool_module, "_START_TIMEOUT_S", 0.1)

    async def body() -> None:
        starting = asyncio.create_task(DecodePool(LIMITS, 2).__aenter__())
        if is_left:
            await until(lambda: bool(children()))
            starting.cancel()
        error, said = (asyncio.CancelledError, None) if is_left else (ConfigError, "decode child")
        with pytest.raises(error, match=said):
            await starting
        assert children() == []

    run(body())
