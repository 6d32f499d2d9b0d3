"""The fastest other reader, when frames count as equal, and the contents of table, file and flags."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from tests.fakes import clip
from tests.unit.bench.reports import draws, text_of
from vidspec_service.bench.decode.readers import GRID, MODULES, Reader, brightness_grid, is_installed
from vidspec_service.bench.decode.run import ClipResult, DecodeOptions, ReaderResult, decode_report, difference


def result(**readers: ReaderResult) -> ClipResult:
    return ClipResult(
        name="a$b^^$.mp4",
        codec="h264",
        duration_s=60.0,
        source_num_frames=1800,
        num_frames=32,
        frame_size=(1280, 720),
        readers={Reader[name]: found for name, found in readers.items()},
    )


OURS = ReaderResult(wall_s=(1.0, 3.0, 1.2), cpu_s=(1.0, 1.0, 1.0), difference=0.0)
SLOWER = ReaderResult(wall_s=(2.4,), cpu_s=(4.0,), difference=0.5)
WRONG = ReaderResult(wall_s=(0.1,), cpu_s=(0.1,), difference=40.0)
BROKEN = ReaderResult(error="RuntimeError: no FFmpeg")
CLIP = result(CHILD=SLOWER, ALL_CORES=OURS, OPENCV=SLOWER, DECORD=WRONG, TORCHCODEC=BROKEN)


def test_a_library_that_gives_other_frames_is_no_peer() -> None:
    assert CLIP.fastest_other is Reader.OPENCV
    assert CLIP.over_fastest_other == 0.5
    assert result(ALL_CORES=OURS, DECORD=WRONG).over_fastest_other is None


def test_equal_frames_differ_by_nothing_at_any_size_and_missing_ones_by_everything() -> None:
    grey = clip(3)
    made = structs.replace(grey, video=replace(grey.video, frames=np.full((3, 36, 50, 3), 128, np.uint8)))
    assert difference(made, [[128.0] * GRID * GRID] * 3) == 0
    assert difference(made, [[128.0] * GRID * GRID] * 2) == 255


def test_a_picture_from_afar_does_not_depend_on_its_size() -> None:
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (GRID, GRID, 3), dtype=np.uint8)
    assert brightness_grid(small) == brightness_grid(small.repeat(5, 0).repeat(7, 1))


def test_table_and_file_say_the_same(tmp_path: Path) -> None:
    report = decode_report(DecodeOptions(), [CLIP], [Reader.OPENCV_SEEK], {})
    text = text_of(report)
    assert "vidspec takes 0.50x the time of the fastest other, opencv" in text
    assert "40.0 !" in text
    assert "torchcodec: RuntimeError: no FFmpeg" in text
    assert "not installed: opencv, seeking" in text
    written = json.loads(report.to_json())["clips"][0]
    assert (written["fastest_other"], written["over_fastest_other"]) == ("opencv", 0.5)
    assert draws(report, tmp_path, "plot")


def test_why_there_is_nothing_to_compare_is_told() -> None:
    clips = result(CHILD=OURS), result(CHILD=OURS, DECORD=WRONG)
    alone, others = (text_of(decode_report(DecodeOptions(), [clip], [], {})) for clip in clips)
    assert "no other library to compare with: pip install" in alone
    assert "no other library gave the same frames" in others
    assert "pip install" not in others


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, Reader.DECORD, "no_such_module")
    assert not is_installed(Reader.DECORD)
    assert is_installed(Reader.COLD)
