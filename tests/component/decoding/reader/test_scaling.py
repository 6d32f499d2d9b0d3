"""Frames larger than any model uses are scaled in the child, with their aspect ratio, so that memory is bounded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.clips import bar_codes, decode_all, number_of, write_video
from tests.component.decoding.reading import LIMITS, read
from vidspec_service.decoding.clip import FrameRequest
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.errors import VideoTooLarge

EIGHT = FrameRequest(num_frames=8)


def test_frames_at_the_limit_are_untouched_and_one_pixel_more_is_scaled(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(8, 128, 96))
    exact = read(path, EIGHT, replace(LIMITS, max_frame_pixels=128 * 96))
    assert np.array_equal(exact.video.frames, np.stack(list(decode_all(path).values())))
    assert exact.warnings == ()
    scaled = read(path, EIGHT, replace(LIMITS, max_frame_pixels=128 * 96 - 1))
    assert (scaled.width, scaled.height) == (127, 95)
    assert scaled.warnings == ("Frames of 128x96 pixels are scaled down to 127x95.",)
    assert scaled.video.frames.shape == (8, 95, 127, 3)


@pytest.mark.parametrize(("rotation", "size"), [(0, (64, 36)), (90, (36, 64)), (180, (64, 36)), (270, (36, 64))])
def test_scaled_frames_keep_their_shape_and_content_and_stand_upright(
    tmp_path: Path, rotation: int, size: tuple[int, int]
) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(8, 320, 180), rotation=rotation, options={"crf": "10"})
    clip = read(path, EIGHT, replace(LIMITS, max_frame_pixels=64 * 36))
    assert (clip.width, clip.height) == size
    whole = read(path, EIGHT)
    assert (whole.width, whole.height) == ((320, 180) if rotation in (0, 180) else (180, 320))
    stored = [np.rot90(frame, -rotation // 90) for frame in clip.video.frames]
    assert [number_of(frame) for frame in stored] == list(range(8))


def test_scaled_frames_are_means_of_what_they_stand_for(tmp_path: Path) -> None:
    fine = np.zeros((64, 64, 3), np.uint8)
    fine[:, ::2] = 255  # picking single columns would give all black or all white
    path = write_video(tmp_path / "a.mkv", [fine] * 2, pix_fmt="yuv444p", options={"crf": "0"})
    clip = read(path, FrameRequest(num_frames=1), replace(LIMITS, max_frame_pixels=16 * 16))
    assert np.abs(clip.video.frames.astype(int) - 127).max() < 16


def test_the_limit_on_decoded_bytes_counts_scaled_frames(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(8, 320, 180))
    limits = replace(LIMITS, max_frame_pixels=64 * 36, max_decoded_bytes=8 * 64 * 36 * 3)
    assert len(read(path, EIGHT, limits).video.frames) == 8
    with pytest.raises(VideoTooLarge, match="8 frames of 64x36 pixels"):
        read(path, EIGHT, replace(limits, max_decoded_bytes=limits.max_decoded_bytes - 1))


@pytest.mark.slow
def test_a_minute_of_4k_is_read_within_the_default_limits(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(60, 3840, 2160), rate=1, options={"preset": "ultrafast"})

    async def body() -> None:
        async with DecodePool(LIMITS, 1) as pool:
            clip = await pool.decode(path, FrameRequest(num_frames=32))
        assert clip.video.duration_s == 60.0
        assert (clip.width, clip.height) == (1365, 768)
        assert [number_of(frame) for frame in clip.video.frames] == list(clip.video.source_indices)

    asyncio.run(body())
