"""A video that several children decode in parallel gives the same clip, warnings and errors as one child."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from io import FileIO
from pathlib import Path

import av
import numpy as np
import psutil
import pytest
from av.bitstream import BitStreamFilterContext
from msgspec import structs

from tests.clips import Picture, bar_codes, write_video
from tests.component.decoding.processes import children, decoders
from tests.hostile.corpus import corpus, mutations
from tests.hostile.seeds import render_seeds
from vidspec_service.decoding import pool as pool_module
from vidspec_service.decoding.clip import WHOLE, Clip, Decoded, DecodingLimits, FrameRequest, Shard
from vidspec_service.decoding.isolation.fork_server import DecodeJob, DecodeResult
from vidspec_service.decoding.isolation.process import DecodeChild, clip_of, frames_memory
from vidspec_service.decoding.pool import DecodePool, merge_shards
from vidspec_service.decoding.reader import read_clip
from vidspec_service.errors import CapacityError, VideoUnreadable

LIMITS = DecodingLimits(max_pixels=1_000_000, timeout_s=20)
GOP, NUM_GOPS = 40, 6
MIDDLES = FrameRequest(num_frames=NUM_GOPS)  # one frame in each group of pictures, far from the next group


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Several children decode any file; records for each file whether their shards were used."""
    taken: list[bool] = []

    def noting(shards: Sequence[Decoded]) -> Decoded | None:
        whole = merge_shards(shards)
        taken.append(whole is not None)
        return whole

    monkeypatch.setattr(pool_module, "_SHARD_BYTES", 1)
    monkeypatch.setattr(pool_module, "merge_shards", noting)
    return taken


def pictures() -> list[Picture]:
    """Drifting coarse noise: every frame differs from the others and depends on those before it."""
    dice = np.random.default_rng(7)
    coarse = dice.integers(0, 256, (16, 24, 3))
    found = []
    for number in range(GOP * NUM_GOPS):
        coarse = np.clip(coarse + dice.integers(-12, 13, coarse.shape), 0, 255)
        found.append(np.roll(coarse.repeat(4, 0).repeat(4, 1), number, 1).astype(np.uint8))
    return found


def test_a_child_that_lies_about_its_part_is_found_out_as_one_alone_is() -> None:
    fair = Decoded(
        timestamps_s=(0.0, 0.5), source_indices=(0, 5), source_fps=10.0, source_num_frames=20, duration_s=2.0,
        width=2, height=2, codec="h264", warnings=(), is_sound=True,
    )  # fmt: skip
    whole = merge_shards([fair, structs.replace(fair, timestamps_s=(1.0,), source_indices=(10, 15))])
    assert whole is not None
    with frames_memory() as frames, pytest.raises(VideoUnreadable):
        clip_of(whole, frames, DecodingLimits())


async def decode_all(
    paths: Sequence[Path], request: FrameRequest, num_children: int, limits: DecodingLimits = LIMITS
) -> list[Clip | BaseException]:
    """Decode the files one after the other."""
    found: list[Clip | BaseException] = []
    async with DecodePool(limits, num_children) as pool:
        for path in paths:
            found += await asyncio.gather(pool.decode(path, request), return_exceptions=True)
    return found


def assert_same(one: Clip | BaseException, other: Clip | BaseException, name: str) -> None:
    if isinstance(one, BaseException) or isinstance(other, BaseException):
        assert (type(one), str(one)) == (type(other), str(other)), name
        return
    assert np.array_equal(one.video.frames, other.video.frames), name
    assert one.timestamps_s == other.timestamps_s, name
    assert one.video.source_indices == other.video.source_indices, name
    assert (one.codec, one.warnings, one.video.duration_s) == (other.codec, other.warnings, other.video.duration_s)


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt", "options"),
    [
        ("b.mp4", "h264", "yuv420p", {"bf": "3", "b-pyramid": "normal"}),
        ("open.ts", "h264", "yuv420p", {"x264-params": "open-gop=1:bframes=3"}),
        ("open.mkv", "hevc", "yuv420p", {"x265-params": "open-gop=1:log-level=none:pools=none:frame-threads=1"}),
        ("vp9.webm", "vp9", "yuv420p", {"deadline": "realtime", "cpu-used": "8"}),
        ("two.mpg", "mpeg2video", "yuv420p", {"bf": "2"}),
        ("four.avi", "mpeg4", "yuv420p", {}),
        ("intra.mkv", "ffv1", "yuv420p", {}),
    ],
)
def test_frames_are_the_same_bytes(
    tmp_path: Path, unlimited: list[bool], name: str, codec: str, pix_fmt: str, options: dict[str, str]
) -> None:
    path = write_video(tmp_path / name, pictures(), codec=codec, pix_fmt=pix_fmt, gop=GOP, options=options)
    (whole,) = asyncio.run(decode_all([path], MIDDLES, 1))
    assert unlimited == []
    (shards,) = asyncio.run(decode_all([path], MIDDLES, 3))
    assert unlimited == [True]
    assert isinstance(whole, Clip)
    assert_same(whole, shards, name)


def test_damaged_and_hostile_files_end_as_they_do_with_one_child(tmp_path: Path, unlimited: list[bool]) -> None:
    seeds = render_seeds(tmp_path)
    files = [
        *corpus(seeds, tmp_path),
        *((f"mutation {i}", each) for i, each in enumerate(mutations(seeds, 30, seed=9))),
    ]
    folder = tmp_path / "files"
    folder.mkdir()
    paths = [folder / str(number) for number in range(len(files))]
    for path, (_, content) in zip(paths, files, strict=True):
        path.write_bytes(content)
    whole, shards = (asyncio.run(decode_all(paths, FrameRequest(num_frames=8), count)) for count in (1, 3))
    for (name, _), one, other in zip(files, whole, shards, strict=True):
        assert_same(one, other, name)
    assert any(unlimited)
    assert not all(unlimited)


@pytest.mark.parametrize("sizes", [((1280, 720), (320, 240)), ((320, 240), (640, 480))])
def test_shards_of_several_sizes_are_the_clip_of_one_child(
    tmp_path: Path, unlimited: list[bool], sizes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    """No child writes to memory that another one cut off, nor checks the memory limit with its own picture size."""
    path = in_a_row(tmp_path, *(bar_codes(2 * GOP, *size) for size in sizes))
    width, height = max(sizes)
    limits = replace(LIMITS, max_decoded_bytes=4 * width * height * 3)
    whole, shards = (asyncio.run(decode_all([path], FrameRequest(num_frames=4), count, limits))[0] for count in (1, 4))
    assert isinstance(whole, Clip)
    assert whole.video.frames.shape == (4, height, width, 3)
    assert_same(whole, shards, path.name)
    assert not any(unlimited)


def test_a_video_that_is_decoded_as_a_whole_after_all_leaves_room_for_others(
    tmp_path: Path, unlimited: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = in_a_row(tmp_path, bar_codes(2 * GOP, 64, 64), bar_codes(2 * GOP, 32, 32))
    decode = DecodeChild.decode

    async def body() -> None:
        async with DecodePool(LIMITS, 2) as pool:

            async def after_another(child: DecodeChild, job: DecodeJob, frames: FileIO) -> DecodeResult:
                if job.shard == WHOLE and job.path == bytes(path):
                    async with asyncio.timeout(10):
                        await pool.decode(tmp_path / "0.ts", MIDDLES)
                return await decode(child, job, frames)

            monkeypatch.setattr(DecodeChild, "decode", after_another)
            assert len((await pool.decode(path, FrameRequest(num_frames=4))).timestamps_s) == 4

    asyncio.run(body())
    assert unlimited == [False]


def test_a_stream_that_was_joined_so_late_that_its_size_is_not_known_is_the_clip_of_one_child(
    tmp_path: Path, unlimited: list[bool]
) -> None:
    """FFmpeg looks for it in the first five megabytes."""
    noise = np.random.default_rng(3).integers(0, 256, (60, 240, 320, 3)).astype(np.uint8)
    path = write_video(tmp_path / "a.ts", noise, gop=50, options={"qp": "1", "preset": "ultrafast"})
    data = path.read_bytes()
    path.write_bytes(data[len(data) // 30 // 188 * 188 :])
    assert len(data) > 7_000_000
    whole, shards = (asyncio.run(decode_all([path], FrameRequest(num_frames=4), count))[0] for count in (1, 3))
    assert isinstance(whole, Clip)
    assert whole.source_indices == (1, 3, 6, 8)
    assert_same(whole, shards, path.name)
    assert unlimited == []


def test_a_part_that_begins_in_another_size_writes_nothing(tmp_path: Path) -> None:
    """The memory has the other shards' frames."""
    path = in_a_row(tmp_path, bar_codes(2 * GOP, 64, 64), bar_codes(2 * GOP, 32, 32))
    written, refused = list[tuple[int, int]](), 0

    def write(pixels: memoryview | bytes, place: int) -> int:
        written.append((len(pixels), place))
        return len(pixels)

    for number in range(4):
        with open(path, "rb", buffering=0) as file:
            try:
                read_clip(file, FrameRequest(num_frames=4), LIMITS, write, Shard(number, 4))
            except VideoUnreadable:
                refused += 1
    frame_bytes = 64 * 64 * 3
    assert (sorted(written), refused) == ([(frame_bytes, 0), (frame_bytes, frame_bytes)], 2)


def test_a_turn_that_only_one_part_sees_is_a_matter_of_the_whole(tmp_path: Path, unlimited: list[bool]) -> None:
    plain = write_video(tmp_path / "plain.ts", pictures(), gop=GOP)
    path = tmp_path / "turned.ts"
    with av.open(plain) as source, av.open(path, "w") as container:
        stream = source.streams.video[0]
        track = container.add_stream_from_template(stream)
        turn = BitStreamFilterContext("h264_metadata=display_orientation=insert:rotate=180:flip=0", stream)
        for packet in source.demux(stream):
            for turned in turn.filter(packet if packet.size else None):
                turned.stream = track
                container.mux(turned)
    some_are_keyframes = FrameRequest(fps=0.5)  # only keyframes carry the rotation
    whole, shards = (asyncio.run(decode_all([path], some_are_keyframes, count))[0] for count in (1, 3))
    assert isinstance(whole, Clip)
    assert_same(whole, shards, path.name)
    assert unlimited == [False]


def in_a_row(tmp_path: Path, *clips: Sequence[Picture]) -> Path:
    """Join clips into one transport stream."""
    content, ticks, start = b"", 3000, 6000
    for number, clip in enumerate(clips):
        pts = [start + ticks * index for index in range(len(clip))]
        part = tmp_path / f"{number}.ts"
        content += write_video(part, clip, gop=GOP, pts=pts, time_base=Fraction(1, 90_000)).read_bytes()
        start += ticks * len(clip)
    path = tmp_path / "all.ts"
    path.write_bytes(content)
    return path


def test_a_part_that_is_lost_or_left_takes_the_others_with_it(
    tmp_path: Path, unlimited: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")  # has no writer, so that opening it blocks
    monkeypatch.setattr(pool_module, "_max_shards", lambda _: 3)
    is_first, wait = iter([True]), DecodeChild._wait

    async def wait_longer(child: DecodeChild) -> int | None:  # for all children but the first
        await asyncio.sleep(0 if next(is_first, False) else 0.3)
        return await wait(child)

    async def body() -> None:
        nonlocal is_first
        async with DecodePool(LIMITS, 3) as pool:
            monkeypatch.setattr(DecodeChild, "_wait", wait_longer)
            for is_left in (False, True):
                is_first = iter([True])
                task = asyncio.create_task(pool.decode(tmp_path / "pipe", FrameRequest()))
                busy = await at_work(3)
                if is_left:
                    task.cancel()
                else:
                    psutil.Process(busy[1]).kill()
                with pytest.raises(asyncio.CancelledError if is_left else CapacityError):
                    await task
                assert not set(busy) & set(decoders())
                assert not pool._work

    asyncio.run(body())
    assert children() == []
    assert unlimited == []


@pytest.mark.parametrize("max_workers", [1, 3])
def test_clips_do_not_wait_for_all_children_of_another(
    tmp_path: Path, unlimited: list[bool], monkeypatch: pytest.MonkeyPatch, max_workers: int
) -> None:
    """All begin at once, with more children than there are spares."""
    os.mkfifo(tmp_path / "pipe")
    clip = write_video(tmp_path / "a.mp4", bar_codes(4))
    monkeypatch.setattr(pool_module, "_max_shards", lambda job: 3 if job.path.endswith(b"pipe") else 1)

    async def body() -> None:
        async with DecodePool(LIMITS, max_workers) as pool:
            long = asyncio.create_task(pool.decode(tmp_path / "pipe", FrameRequest()))
            async with asyncio.timeout(LIMITS.timeout_s / 2):
                assert len(await asyncio.gather(*(pool.decode(clip, FrameRequest()) for _ in range(5)))) == 5
            await at_work(max_workers)
            assert not long.done()
            long.cancel()
            await asyncio.wait({long})

    asyncio.run(body())
    assert children() == []
    assert unlimited == []


async def at_work(count: int) -> list[int]:
    """The `count` oldest children, once there are as many spares."""
    async with asyncio.timeout(30):
        while True:
            if len(found := decoders()) == 2 * count:
                return found[:count]
            await asyncio.sleep(0.01)
