"""The hostile corpus through the decode pool: each file is read or refused in our words, in time, without leaks."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.component.decoding.processes import children
from tests.hostile.corpus import corpus, mutations
from tests.hostile.seeds import Seeds, render_seeds
from vidspec_service.decoding.clip import Clip, DecodingLimits, FrameRequest
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.errors import RequestError, VideoUnreadable, VideoUnsupported

_LIMITS = DecodingLimits(timeout_s=30)
_AT_ONCE = 2
_EIGHT = FrameRequest(num_frames=8)
_FFMPEG_WORDS = re.compile(r"0x[0-9a-f]{4}|Errno|avcodec|Invalid data|ffmpeg|passwd|Traceback", re.IGNORECASE)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return render_seeds(tmp_path_factory.mktemp("seeds"))


def decode_all(contents: Sequence[bytes], folder: Path, request: FrameRequest = _EIGHT) -> list[Clip | BaseException]:
    """The outcome of each file, in order; asserts that no child and no file descriptor is left."""
    folder.mkdir()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    async def body() -> list[Clip | BaseException]:
        gate = asyncio.Semaphore(_AT_ONCE)
        async with DecodePool(_LIMITS, _AT_ONCE) as pool:

            async def decode(number: int, content: bytes) -> Clip:
                async with gate:
                    path = folder / str(number)
                    await asyncio.to_thread(path.write_bytes, content)
                    return await pool.decode(path, request)

            decodes = (decode(number, content) for number, content in enumerate(contents))
            return await asyncio.gather(*decodes, return_exceptions=True)

    found = asyncio.run(body())
    assert children() == []
    num_clips = sum(isinstance(outcome, Clip) for outcome in found)
    gc.collect()
    assert (
        len(os.listdir("/proc/self/fd")) <= before + 2 * num_clips
    )  # each clip holds one for its mapping and one for sharing, and frees both
    return found


def assert_harmless(outcome: Clip | BaseException, folder: Path) -> None:
    """The outcome is a consistent clip, or a request error that leaks nothing."""
    if isinstance(outcome, Clip):
        assert 1 <= len(outcome.video.frames) <= 8
        assert outcome.video.frames.shape == (len(outcome.timestamps_s), outcome.height, outcome.width, 3)
        assert outcome.height * outcome.width <= _LIMITS.max_frame_pixels
        assert 0 < outcome.video.duration_s <= _LIMITS.max_duration_s
        assert list(outcome.timestamps_s) == sorted(set(outcome.timestamps_s))
    else:
        assert isinstance(outcome, RequestError), repr(outcome)
        assert not _FFMPEG_WORDS.search(outcome.message)
        assert str(folder) not in outcome.message
        assert "did not end within" not in outcome.message


def test_every_kind_of_hostile_file_is_refused_or_read_and_no_child_falls(
    seeds: Seeds, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = corpus(seeds, tmp_path)
    assert len(kinds) >= 60
    found = decode_all([content for _, content in kinds], tmp_path / "files")
    for (name, _), outcome in zip(kinds, found, strict=True):
        try:
            assert_harmless(outcome, tmp_path)
        except AssertionError as error:
            raise AssertionError(name) from error
        if name.startswith("disguise"):
            assert isinstance(outcome, VideoUnsupported | VideoUnreadable), name
        if name.startswith("codec") and "sound" not in name:
            assert isinstance(outcome, VideoUnsupported), name
    # A crashed child also gives a refusal, but would be a case that our code does not handle.
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_damaged_clips_are_refused_or_read(seeds: Seeds, tmp_path: Path, count: int) -> None:
    found = decode_all(list(mutations(seeds, count, seed=1)), tmp_path / "files")
    for outcome in found:
        assert_harmless(outcome, tmp_path)
    clips = [outcome for outcome in found if isinstance(outcome, Clip)]
    assert 0.2 < len(clips) / count < 0.9  # the damage is neither too mild nor too severe
    assert any(any("damaged" in w or "stand in" in w for w in clip.warnings) for clip in clips)


@pytest.mark.parametrize("name", ["mp4", "mkv", "ts"])
def test_the_corpus_is_made_of_clips_that_play(seeds: Seeds, tmp_path: Path, name: str) -> None:
    (clip,) = decode_all([getattr(seeds, name)], tmp_path / "files")
    assert isinstance(clip, Clip)
    assert len(clip.video.frames) == 8
