"""A client's own frames: each is decoded like an image; all have one size and the client's times."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from tests.component.decoding.reading import read
from tests.hostile.stills import corners, still
from vidspec_service.decoding import pool as pool_module
from vidspec_service.decoding.clip import DecodingLimits, FrameRequest, FrameSequence
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.errors import InvalidRequest, VideoError, VideoTooLarge, VideoUnreadable

pytestmark = pytest.mark.component

JPEG = still("JPEG")


def stored(
    tmp_path: Path, images: list[bytes], *times_s: float, fps: float | None = None
) -> tuple[Path, FrameSequence]:
    path = tmp_path / "frames"
    path.write_bytes(b"".join(images))
    shown = times_s or tuple(index / (fps or 1.0) for index in range(len(images)))
    return path, FrameSequence(num_bytes=tuple(map(len, images)), timestamps_s=shown, fps=fps)


def test_all_frames_stay_in_their_order_with_the_clients_times(tmp_path: Path) -> None:
    path, sequence = stored(tmp_path, [JPEG, JPEG, JPEG], 12.0, 12.25, 14.0)
    clip = read(path, FrameRequest(sequence=sequence))
    assert clip.video.frames.shape == (3, *corners().shape)
    assert (np.abs(clip.video.frames[2].astype(int) - corners()) < 40).mean() > 0.95
    assert clip.timestamps_s == (12.0, 12.25, 14.0)
    assert (clip.video.source_indices, clip.video.source_fps) == ((12_000, 12_250, 14_000), 1000.0)
    assert (clip.video.duration_s, clip.video.source_num_frames) == (15.0, 15_000)
    assert (clip.codec, clip.warnings) == ("mjpeg", ())


def test_frames_a_millisecond_apart_have_numbers_of_their_own(tmp_path: Path) -> None:
    times_s = (2057.8575, 2057.8585, 2057.859)
    path, sequence = stored(tmp_path, [JPEG] * 3, *times_s)
    clip = read(path, FrameRequest(sequence=sequence))
    assert clip.timestamps_s == times_s
    assert clip.video.source_indices == (2057858, 2057859, 2057860)
    assert clip.video.source_num_frames > 2057860


def test_at_a_rate_frames_are_counted(tmp_path: Path) -> None:
    path, sequence = stored(tmp_path, [JPEG] * 5, fps=2.0)
    clip = read(path, FrameRequest(sequence=sequence))
    assert (clip.video.source_indices, clip.video.source_fps, clip.video.duration_s) == ((0, 1, 2, 3, 4), 2.0, 2.5)


def test_at_even_times_frames_are_counted_too(tmp_path: Path) -> None:
    path, sequence = stored(tmp_path, [JPEG] * 2, 0.0, 4.0)
    clip = read(path, FrameRequest(sequence=sequence))
    assert (clip.video.source_indices, clip.video.source_fps, clip.video.duration_s) == ((0, 1), 0.25, 8.0)


@pytest.mark.parametrize(("times_s", "fps", "end_s"), [((7.0,), None, 8.0), ((), 0.25, 4.0)])
def test_a_lone_frame_is_shown_for_a_second_or_as_long_as_its_rate_says(
    tmp_path: Path, times_s: tuple[float, ...], fps: float | None, end_s: float
) -> None:
    path, sequence = stored(tmp_path, [JPEG], *times_s, fps=fps)
    assert read(path, FrameRequest(sequence=sequence)).duration_s == end_s


@pytest.mark.parametrize(
    ("asked", "times_s"),
    [
        ({"num_frames": 2}, (11.0, 13.0)),
        ({"fps": 0.5}, (10.0, 12.0)),
        ({"start_s": 11.0, "end_s": 13.0}, (11.0, 12.0)),
        ({"max_frames": 2}, (11.0, 13.0)),
    ],
)
def test_fewer_are_chosen_if_that_is_asked(tmp_path: Path, asked: dict[str, float], times_s: tuple[float, ...]) -> None:
    path, sequence = stored(tmp_path, [JPEG] * 4, 10.0, 11.0, 12.0, 13.0)
    clip = read(path, FrameRequest(sequence=sequence, **asked))  # type: ignore[arg-type]
    assert clip.timestamps_s == times_s


def test_a_window_without_a_frame_is_refused(tmp_path: Path) -> None:
    path, sequence = stored(tmp_path, [JPEG] * 2, 10.0, 11.0)
    with pytest.raises(InvalidRequest, match="No frame lies between"):
        read(path, FrameRequest(sequence=sequence, end_s=9.0))


def test_frames_of_two_sizes_are_refused_with_both(tmp_path: Path) -> None:
    other = io.BytesIO()
    Image.fromarray(corners()[:32]).save(other, "JPEG")
    path, sequence = stored(tmp_path, [JPEG, JPEG, other.getvalue()])
    with pytest.raises(
        InvalidRequest, match="Frame 2 has 96x32 pixels, others 96x64: all frames must have the same size"
    ):
        read(path, FrameRequest(sequence=sequence))


@pytest.mark.parametrize("max_frame_pixels", [96 * 64, 48 * 32])
def test_each_frame_is_turned_as_its_camera_was_held(tmp_path: Path, max_frame_pixels: int) -> None:
    upright, images = Image.fromarray(corners()), []
    for orientation in range(1, 9):
        upright.getexif()[ExifTags.Base.Orientation] = {6: 8, 8: 6}.get(orientation, orientation)  # turns it back
        file = io.BytesIO()
        turned = ImageOps.exif_transpose(upright)
        turned.getexif()[ExifTags.Base.Orientation] = orientation
        turned.save(file, "JPEG", quality=98, exif=turned.getexif())
        images.append(file.getvalue())
    path, sequence = stored(tmp_path, images)
    frames = read(path, FrameRequest(sequence=sequence), DecodingLimits(max_frame_pixels=max_frame_pixels)).video.frames
    assert len(frames) == 8
    for frame in frames:
        assert (np.abs(frame[8:-8:4, 8:-8:4].astype(int) - frames[0, 8:-8:4, 8:-8:4]) < 40).mean() > 0.95


@pytest.mark.parametrize(
    "bad",
    [JPEG[:40], JPEG[: -len(JPEG) // 8], JPEG[:3] + bytes(200), b"\xff\xd8\xff", still("PNG")],
    ids=["head cut", "picture cut", "zeros", "head", "PNG"],
)
def test_a_frame_that_cannot_be_decoded_is_named(tmp_path: Path, bad: bytes) -> None:
    path, sequence = stored(tmp_path, [JPEG, bad, JPEG])
    with pytest.raises(VideoUnreadable, match="Frame 1 cannot be decoded"):
        read(path, FrameRequest(sequence=sequence))


def test_limits_hold_for_them_too(tmp_path: Path) -> None:
    path, sequence = stored(tmp_path, [JPEG] * 4)
    asked = FrameRequest(sequence=sequence)
    with pytest.raises(VideoTooLarge, match="There are 4 frames; the limit is 3"):
        read(path, asked, limits=DecodingLimits(max_frames=3))
    with pytest.raises(VideoTooLarge, match="VIDSPEC_MAX_DECODED_BYTES"):
        read(path, asked, limits=DecodingLimits(max_decoded_bytes=3 * 96 * 64 * 3))
    with pytest.raises(VideoTooLarge, match="VIDSPEC_MAX_UPLOAD_BYTES"):
        read(path, asked, limits=DecodingLimits(max_bytes=4 * len(JPEG) - 1))
    with pytest.raises(VideoError):
        read(path, asked, limits=DecodingLimits(max_pixels=96 * 64 - 1))


def test_a_confined_child_reads_them_and_videos_share_what_one_may_cost(tmp_path: Path) -> None:
    path, sequence = stored(tmp_path, [JPEG] * 4)

    async def body() -> None:
        async with DecodePool(DecodingLimits(max_frames=8), 1) as pool:
            clip = await pool.decode(path, FrameRequest(sequence=sequence, num_sharing=2))
            assert len(clip.video.frames) == 4
            with pytest.raises(VideoTooLarge, match="There are 4 frames; the limit is 2"):
                await pool.decode(path, FrameRequest(sequence=sequence, num_sharing=4))
            with pytest.raises(VideoTooLarge, match="num_frames is 5; the limit is 4"):
                await pool.decode(path, FrameRequest(sequence=sequence, num_frames=5, num_sharing=2))

    asyncio.run(body())


def test_they_are_one_childs_work_however_large_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_SHARD_BYTES", 1)
    path, sequence = stored(tmp_path, [JPEG] * 4)

    async def body() -> None:
        async with DecodePool(DecodingLimits(), 3) as pool:
            clip = await pool.decode(path, FrameRequest(sequence=sequence))
            assert clip.timestamps_s == (0.0, 1.0, 2.0, 3.0)
            assert len(clip.video.frames) == 4

    asyncio.run(body())
