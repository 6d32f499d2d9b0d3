"""How pictures come out: rotated upright, odd sizes, changing sizes, colours, several tracks."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.bitstream import BitStreamFilterContext
from av.stream import Disposition

from tests.clips import Picture, bar_codes, number_of, write_film, write_video
from tests.component.decoding.reading import read
from vidspec_service.decoding.clip import FrameRequest

pytestmark = pytest.mark.component


def corners(width: int = 96, height: int = 64) -> Picture:
    """Quarters from the top left: red, green; blue, grey."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[: height // 2, : width // 2] = (230, 20, 20)
    picture[: height // 2, width // 2 :] = (20, 230, 20)
    picture[height // 2 :, : width // 2] = (20, 20, 230)
    picture[height // 2 :, width // 2 :] = (128, 128, 128)
    return picture


@pytest.mark.parametrize(
    ("rotation", "turn"),
    [
        (0, lambda picture: picture),
        (90, lambda picture: np.rot90(picture)),
        (180, lambda picture: np.rot90(picture, 2)),
        (270, lambda picture: np.rot90(picture, 3)),
    ],
)
@pytest.mark.parametrize("name", ["a.mp4", "a.mov"])
def test_rotated_clips_stand_upright(tmp_path: Path, name: str, rotation: int, turn: object) -> None:
    assert callable(turn)
    path = write_video(tmp_path / name, [corners()] * 3, rotation=rotation, options={"crf": "4"})
    clip = read(path)
    expected = turn(corners())
    assert (clip.height, clip.width) == expected.shape[:2]
    assert clip.video.frames.shape == (3, *expected.shape)
    inner = np.abs(clip.video.frames[1].astype(int) - expected) < 40
    assert inner.mean() > 0.95  # colours blur where quarters meet


def test_mirrored_clips_are_mirrored_back(tmp_path: Path) -> None:
    clip = read(write_video(tmp_path / "a.mp4", [corners()], rotation=0, hflip=True, options={"crf": "4"}))
    assert clip.video.frames[0, 10, 85, 0] > 180  # red is on the right after mirroring
    assert clip.video.frames[0, 10, 10, 1] > 180


def test_an_odd_angle_is_left_alone_and_said(tmp_path: Path) -> None:
    clip = read(write_video(tmp_path / "a.mp4", bar_codes(2), rotation=30))
    assert any("not a multiple of 90 degrees" in warning for warning in clip.warnings)
    assert number_of(clip.video.frames[1]) == 1


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt", "size"),
    [
        ("a.mp4", "h264", "yuv444p", (67, 51)),
        ("a.webm", "vp9", "yuv420p", (67, 51)),
        ("b.mp4", "mpeg4", "yuv420p", (67, 51)),
        ("c.mp4", "hevc", "yuv420p10le", (130, 34)),
        ("d.mp4", "h264", "gray", (64, 64)),
    ],
)
def test_odd_sizes_and_formats(tmp_path: Path, name: str, codec: str, pix_fmt: str, size: tuple[int, int]) -> None:
    clip = read(write_video(tmp_path / name, bar_codes(5, *size), codec=codec, pix_fmt=pix_fmt))
    assert (clip.width, clip.height) == size
    assert [number_of(frame) for frame in clip.video.frames] == [0, 1, 2, 3, 4]


def test_a_crop_is_exact_at_every_side(tmp_path: Path) -> None:
    uncropped = write_video(tmp_path / "uncropped.h264", bar_codes(3, 96, 64))
    crop = "crop_left=6:crop_top=4:crop_right=10:crop_bottom=2"
    cropped = tmp_path / "cropped.h264"
    with av.open(uncropped) as container, cropped.open("wb") as file:
        stream = container.streams.video[0]
        crops = BitStreamFilterContext(f"h264_metadata={crop}", stream)
        for packet in container.demux(stream):
            file.writelines(bytes(each) for each in crops.filter(packet if packet.size else None))
    assert np.array_equal(read(cropped).video.frames, read(uncropped).video.frames[:, 4:-2, 6:-10])


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuvj420p"])
def test_full_and_limited_range_give_the_same_grey(tmp_path: Path, pix_fmt: str) -> None:
    grey = [np.full((64, 64, 3), 200, np.uint8)]
    codec = "mjpeg" if pix_fmt == "yuvj420p" else "h264"
    clip = read(write_video(tmp_path / "a.mov", grey, codec=codec, pix_fmt=pix_fmt))
    assert abs(int(clip.video.frames.mean()) - 200) <= 2


@pytest.mark.parametrize("is_growing", [True, False])
def test_a_size_that_changes_is_scaled_to_the_largest(tmp_path: Path, is_growing: bool) -> None:
    """Recorded calls begin small, and grow when the network has shown what it can carry."""
    first, second = [(64, 64), (128, 96)] if is_growing else [(128, 96), (64, 64)]
    start = write_video(tmp_path / "1.ts", bar_codes(10, *first), gop=5)
    later = [6000 + 3000 * i for i in range(10, 20)]
    end = write_video(tmp_path / "2.ts", bar_codes(20, *second)[10:], gop=5, pts=later, time_base=Fraction(1, 90_000))
    both = tmp_path / "both.ts"
    both.write_bytes(start.read_bytes() + end.read_bytes())
    clip = read(both, FrameRequest(num_frames=20))
    assert clip.video.frames.shape == (20, 96, 128, 3)
    assert [number_of(frame) for frame in clip.video.frames] == list(range(20))
    assert clip.warnings == ("10 of the 20 chosen frames have another size and are scaled to the largest one's.",)


def test_pixels_that_are_not_square_are_said(tmp_path: Path) -> None:
    clip = read(write_video(tmp_path / "a.mp4", bar_codes(2), aspect=Fraction(4, 3)))
    assert clip.video.frames.shape == (2, 64, 64, 3)
    assert "Pixels are not square (4/3); frames are used as stored." in clip.warnings


def test_audio_is_ignored_and_said(tmp_path: Path) -> None:
    clip = read(write_video(tmp_path / "a.mp4", bar_codes(30), with_audio=True), FrameRequest(num_frames=30))
    assert clip.warnings == ("Audio is ignored.",)
    assert [number_of(frame) for frame in clip.video.frames] == list(range(30))


@pytest.mark.parametrize(
    ("name", "num_sounds"), [("a.mp4", 12), ("a.mkv", 40), ("a.ts", 12), ("a.avi", 12), ("b.ts", 127)]
)
def test_a_film_with_many_sounds_is_seen_whole(tmp_path: Path, name: str, num_sounds: int) -> None:
    clip = read(write_film(tmp_path / name, bar_codes(30), num_sounds=num_sounds), FrameRequest(num_frames=30))
    assert clip.warnings == ("Audio is ignored.",)
    assert [number_of(frame) for frame in clip.video.frames] == list(range(30))


@pytest.mark.parametrize("main", [32, 64])
def test_of_two_video_tracks_the_main_one_is_read_and_said(tmp_path: Path, main: int) -> None:
    path = tmp_path / "a.mkv"
    with av.open(path, "w") as container:
        streams = []
        for size in (32, 64):
            stream = container.add_stream("mpeg4", rate=10)
            stream.width = stream.height = size
            stream.disposition = Disposition.default if size == main else Disposition(0)
            streams.append((stream, size))
        for number in range(5):
            for stream, size in streams:
                picture = bar_codes(number + 1, size, size)[number]
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        for stream, _ in streams:
            container.mux(stream.encode())
    clip = read(path)
    assert clip.video.source_num_frames == 5
    assert f"The file has several video tracks; the one with {main}x{main} pixels is used." in clip.warnings
    assert (clip.width, clip.height) == (main, main)
    assert [number_of(frame) for frame in clip.video.frames] == list(range(5))


def test_a_cover_picture_is_no_second_track(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(path, "w") as container:
        cover, film = container.add_stream("mjpeg", rate=1), container.add_stream("mpeg4", rate=10)
        cover.disposition, cover.pix_fmt = Disposition.attached_pic, "yuvj420p"
        cover.width = cover.height = 128
        film.width = film.height = 64
        for stream, pictures in ((cover, bar_codes(1, 128, 128)), (film, bar_codes(5))):
            for picture in pictures:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
    clip = read(path, FrameRequest(num_frames=5))
    assert clip.warnings == ()
    assert [number_of(frame) for frame in clip.video.frames] == list(range(5))


def test_a_track_that_appears_on_the_way_does_no_harm(tmp_path: Path) -> None:
    # Appears too late for FFmpeg's probe at the start, too early for its look at the end.
    rng = np.random.default_rng(0)
    parts = []
    for first, count, is_heavy in ((0, 100, False), (100, 5, False), (105, 80, True)):
        pictures = bar_codes(first + count, 96, 64)[first:]
        if is_heavy:
            pictures = [np.clip(p + rng.integers(-30, 30, p.shape), 0, 255).astype(np.uint8) for p in pictures]
        path = write_video(
            tmp_path / f"{first}.ts",
            pictures,
            gop=1,
            pts=[45_000 * (first + i) for i in range(count)],
            time_base=Fraction(1, 90_000),
            with_audio=first == 100,
            options={"crf": "1"},
        )
        parts.append(path.read_bytes())
    path = tmp_path / "all.ts"
    path.write_bytes(b"".join(parts))
    with av.open(path) as container, pytest.raises(IndexError):  # PyAV's own error
        assert len(list(container.demux(video=0))) == 185
    clip = read(path)
    assert [number_of(frame) for frame in clip.video.frames] == list(range(185))
