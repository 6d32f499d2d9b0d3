"""Less common containers and codecs: the frames are those that FFmpeg shows, also when each is read alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.clips import Picture, bar_code, decode_all, number_of, write_video
from tests.component.decoding.reading import EVERY_FRAME, read
from vidspec_service.decoding.clip import FrameRequest

pytestmark = pytest.mark.component

COUNT = 30
FORMATS = [
    # file, codec, pixel format, size
    ("a.gif", "gif", "rgb8", (64, 64)),
    ("a.apng", "apng", "rgb24", (64, 64)),
    ("a.flv", "flv", "yuv420p", (64, 64)),
    ("b.flv", "h264", "yuv420p", (64, 64)),
    ("a.wmv", "wmv1", "yuv420p", (64, 64)),
    ("b.wmv", "wmv2", "yuv420p", (64, 64)),
    ("c.wmv", "msmpeg4", "yuv420p", (64, 64)),
    ("a.3gp", "h263", "yuv420p", (128, 96)),
    ("a.avi", "msmpeg4v2", "yuv420p", (64, 64)),
    ("b.avi", "msmpeg4", "yuv420p", (64, 64)),
    ("c.avi", "dvvideo", "yuv420p", (720, 576)),
    ("d.avi", "ffv1", "yuv420p", (64, 64)),
    ("a.dv", "dvvideo", "yuv420p", (720, 576)),
    ("a.mkv", "ffv1", "yuv420p", (64, 64)),
    ("a.mxf", "mpeg2video", "yuv420p", (64, 64)),
    ("a.mov", "png", "rgb24", (64, 64)),
    ("b.mov", "qtrle", "rgb24", (64, 64)),
    ("c.mov", "qtrle", "gray", (64, 64)),  # has a palette, which only the first packet states
    ("a.h264", "h264", "yuv420p", (64, 64)),
    ("a.hevc", "hevc", "yuv420p", (64, 64)),
]


def moving(number: int, size: tuple[int, int]) -> Picture:
    """The bar code and small changes, which a codec encodes as a difference."""
    picture = bar_code(number, *size)
    picture[-8:, number % 32 : number % 32 + 4] = (255, 0, 128)
    return picture


@pytest.mark.parametrize(("name", "codec", "pix_fmt", "size"), FORMATS, ids=[each[0] for each in FORMATS])
def test_every_frame_is_seen_and_each_alone_is_the_same(
    tmp_path: Path, name: str, codec: str, pix_fmt: str, size: tuple[int, int]
) -> None:
    pictures = [moving(number, size) for number in range(COUNT)]
    path = write_video(tmp_path / name, pictures, codec=codec, pix_fmt=pix_fmt, rate=25)
    whole = read(path, FrameRequest(num_frames=COUNT))
    assert [number_of(frame) for frame in whole.video.frames] == list(range(COUNT))
    assert whole.video.duration_s == pytest.approx(COUNT / 25, rel=0.05)
    for num_frames in (1, 3, 7):
        some = read(path, FrameRequest(num_frames=num_frames))
        for index, frame in zip(some.video.source_indices, some.video.frames, strict=True):
            assert np.array_equal(frame, whole.video.frames[index])


def test_a_file_of_a_security_camera_is_a_program_stream_after_a_header(tmp_path: Path) -> None:
    """Hikvision's recorders export such files, as .mp4."""
    path = write_video(tmp_path / "a.mpg", [moving(number, (64, 64)) for number in range(COUNT)], rate=25)
    path.write_bytes(b"IMKH" + bytes(36) + path.read_bytes())
    assert [number_of(frame) for frame in read(path, EVERY_FRAME).video.frames] == list(range(COUNT))


def test_an_animation_of_one_picture_is_a_video_of_one_frame(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.gif", [moving(5, (64, 64))], codec="gif", pix_fmt="rgb8")
    assert [number_of(frame) for frame in read(path, EVERY_FRAME).video.frames] == [5]


def test_an_animated_png_may_say_so_after_its_palette_and_colour_profile(tmp_path: Path) -> None:
    first, *others = [Image.fromarray(moving(number, (64, 64))).quantize() for number in range(5)]
    profile = np.random.default_rng(7).bytes(2500)  # of screens, compressed
    first.save(tmp_path / "a.png", save_all=True, append_images=others, duration=40, icc_profile=profile)
    assert [number_of(frame) for frame in read(tmp_path / "a.png", EVERY_FRAME).video.frames] == list(range(5))


@pytest.mark.parametrize("name", ["a.h264", "a.hevc"])
def test_a_stream_without_times_has_the_rate_that_its_codec_states_and_says_so(tmp_path: Path, name: str) -> None:
    codec = name.partition(".")[2]
    path = write_video(tmp_path / name, [moving(number, (64, 64)) for number in range(5)], codec=codec, rate=50)
    clip = read(path)
    assert "The file has no timestamps; 50 frames per second are assumed." in clip.warnings
    assert clip.timestamps_s == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08])


def test_ffmpeg_agrees(tmp_path: Path) -> None:
    path = write_video(
        tmp_path / "a.gif", [moving(number, (64, 64)) for number in range(12)], codec="gif", pix_fmt="rgb8"
    )
    frames = read(path, EVERY_FRAME).video.frames
    assert all(np.array_equal(mine, its) for mine, its in zip(frames, decode_all(path).values(), strict=True))
