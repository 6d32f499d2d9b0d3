"""Images: read upright as clips of one frame, under the same limits, only if the request announced an image."""

from __future__ import annotations

import gc
import io
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import pytest
from av.sidedata.sidedata import Type as SideDataType
from PIL import Image, ImageOps

from tests.clips import bar_codes, write_video
from tests.component.decoding.reading import read
from tests.component.decoding.test_hostile import assert_harmless, decode_all
from tests.hostile.corpus import mutated
from tests.hostile.stills import corners, still, still_bombs
from vidspec_service.decoding.clip import Clip, DecodingLimits, FrameRequest
from vidspec_service.errors import RequestError, VideoTooLarge, VideoUnreadable, VideoUnsupported

pytestmark = pytest.mark.component

KINDS = ("PNG", "JPEG", "WEBP")
STILL = FrameRequest(is_still=True, num_frames=1)


def assert_looks_like(clip: Clip, picture: np.ndarray) -> None:
    assert clip.video.frames.shape == (1, *picture.shape)
    assert (np.abs(clip.video.frames[0].astype(int) - picture) < 40).mean() > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_a_clip_of_one_frame(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "still"
    path.write_bytes(still(kind))
    clip = read(path, STILL)
    assert_looks_like(clip, corners())
    assert (clip.timestamps_s, clip.video.source_num_frames, clip.warnings) == ((0.0,), 1, ())


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_a_camera_that_was_held_sideways_is_believed(tmp_path: Path, kind: str, orientation: int) -> None:
    content = still(kind, orientation=orientation)
    (tmp_path / "still").write_bytes(content)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    assert_looks_like(read(tmp_path / "still", STILL), np.asarray(upright).astype(int))


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "L"), ("PNG", "P"), ("PNG", "RGBA"), ("PNG", "1"), ("JPEG", "L"), ("JPEG", "CMYK")]
)
def test_every_kind_of_colour_is_read(tmp_path: Path, kind: str, mode: str) -> None:
    (tmp_path / "still").write_bytes(still(kind, mode=mode))
    assert read(tmp_path / "still", STILL).video.frames.shape == (1, 64, 96, 3)


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"), ("PNG", "animated"), ("WEBP", "RGBA")]
)
def test_transparent_pixels_are_white_and_opaque_ones_exact(tmp_path: Path, kind: str, mode: str) -> None:
    """Diagrams and formulas are often black on nothing, of which files say that it is black too."""
    levels = np.random.default_rng(7).integers(0, 256, (64, 96, 2)).astype(np.uint8)
    levels[:32, :, 1], levels[32:, :48, 1] = 255, 0
    image = Image.fromarray(levels, "LA")
    if mode == "P":
        image = image.convert("L").convert("P")
        image.info["transparency"] = 7
    elif mode != "LA":
        image = image.convert("RGBA")
    others = [image.rotate(180)] if mode == "animated" else None
    image.save(tmp_path / "still", kind, lossless=True, exact=True, save_all=bool(others), append_images=others or [])
    page = Image.new("RGBA", image.size, "white")
    with Image.open(tmp_path / "still") as saved:
        page.alpha_composite(saved.convert("RGBA"))
    shown = np.asarray(page.convert("RGB")).astype(int)
    frame = read(tmp_path / "still", FrameRequest(num_frames=2) if others else STILL).video.frames[0]
    difference = np.abs(frame.astype(int) - shown)
    assert difference.max() <= 1
    assert difference[:32].max() == difference[32:, :48].max() == 0


def test_no_frame_outlives_its_reading_nor_is_its_colour_profile_freed_twice(tmp_path: Path) -> None:
    (tmp_path / "still").write_bytes(still("PNG", icc_profile=bytes(500)))
    gc.collect()
    gc.disable()
    try:
        read(tmp_path / "still", STILL)
        left = [each for each in gc.get_objects() if type(each) is av.VideoFrame]  # a dead proxy has no `__class__`
    finally:
        gc.enable()
    assert max(frame.planes[0].line_size for frame in left) < 96 * 3  # a line of the image
    kinds = {data.type for frame in left for data in cast(Any, frame.side_data)}
    assert SideDataType.ICC_PROFILE not in kinds


def test_frames_that_carry_exif_are_read(tmp_path: Path) -> None:
    """Cameras write such frames into AVI and MOV; PyAV itself fails on side data that it does not know."""
    path = tmp_path / "camera.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuvj420p"
        for number in range(4):
            packet = av.Packet(still("JPEG", orientation=3))
            packet.stream, packet.time_base, packet.duration = stream, Fraction(1, 10), 1
            packet.pts = packet.dts = number
            container.mux(packet)
    clip = read(path)
    assert len(clip.video.frames) == 4
    assert clip.video.frames[0, 60, 90, 0] > 180  # stored upside down, so after rotation red is at the bottom right


def test_a_jpeg_for_print_has_the_colours_of_the_screen(tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 30, 40)).convert("CMYK").save(content, "JPEG")
    (clip,) = decode_all([content.getvalue()], tmp_path / "files", STILL)
    assert isinstance(clip, Clip)
    assert np.abs(clip.video.frames[0, 16, 16].astype(int) - (200, 30, 40)).max() < 8


def test_what_the_decoder_does_not_support_is_not_called_damaged_alone(tmp_path: Path) -> None:
    (tmp_path / "still").write_bytes(still("JPEG", mode="CMYK", subsampling="4:2:2"))
    with pytest.raises(VideoUnreadable, match="damaged, or of a kind that the decoder does not support"):
        read(tmp_path / "still", STILL)


@pytest.mark.parametrize("side", [200, 1200])  # less and more than the megabyte that FFmpeg looks at
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_what_phones_put_after_the_image_is_not_shown(tmp_path: Path, kind: str, side: int) -> None:
    noise = np.random.default_rng(7).integers(0, 256, (side, side, 3)).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).save(content, kind, quality=95)
    alone, followed = tmp_path / "alone", tmp_path / "followed"
    alone.write_bytes(content.getvalue())
    followed.write_bytes(content.getvalue() + still(kind))
    assert (followed.stat().st_size > 2**20) == (side > 1000)
    clip = read(followed, STILL)
    assert np.array_equal(clip.video.frames, read(alone, STILL).video.frames)
    assert clip.video.source_num_frames == 1


@pytest.mark.parametrize("is_progressive", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_was_cut_short_is_refused_and_not_completed(
    tmp_path: Path, kind: str, is_progressive: bool
) -> None:
    whole = still(kind, progressive=is_progressive)
    (tmp_path / "still").write_bytes(whole[: -len(whole) // 8])
    with pytest.raises(VideoUnreadable, match="damaged"):
        read(tmp_path / "still", STILL)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_over_the_limit_is_refused_with_its_size_and_one_at_the_limit_is_read(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "still").write_bytes(still(kind))
    assert_looks_like(read(tmp_path / "still", STILL, DecodingLimits(max_pixels=96 * 64)), corners())
    with pytest.raises(VideoTooLarge, match=r"96x64 = 6,144 pixels; the limit is 6,143 \(VIDSPEC_MAX_PIXELS\)"):
        read(tmp_path / "still", STILL, DecodingLimits(max_pixels=96 * 64 - 1))


def test_only_what_was_announced_is_read(tmp_path: Path) -> None:
    video = write_video(tmp_path / "clip.mp4", bar_codes(2))
    with pytest.raises(VideoUnsupported, match=r"The file is a video\. Accepted as an image are PNG, JPEG and WebP"):
        read(video, STILL)
    (tmp_path / "still").write_bytes(still("PNG"))
    with pytest.raises(VideoUnsupported, match="The file is a PNG image, not a video"):
        read(tmp_path / "still")
    (tmp_path / "still").write_bytes(b"GIF89a" + bytes(600))
    with pytest.raises(VideoUnsupported, match=r"The file is a video\. Accepted as an image are"):
        read(tmp_path / "still", STILL)
    (tmp_path / "still").write_bytes(b"RIFF\x00\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x12" + bytes(600))
    with pytest.raises(VideoUnsupported, match="The file is an animated WebP image"):
        read(tmp_path / "still", STILL)


def test_bombs_are_refused_or_harmless_and_no_child_falls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bombs = dict(still_bombs())
    found = dict(zip(bombs, decode_all(list(bombs.values()), tmp_path / "files", STILL), strict=True))
    for name, outcome in found.items():
        assert_harmless(outcome, tmp_path)
        if "16k" in name:
            assert isinstance(outcome, VideoUnreadable), name
            assert "more than 9,437,184 pixels (VIDSPEC_MAX_PIXELS)" in outcome.message
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("count", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_damaged_images_are_refused_or_read(tmp_path: Path, count: int) -> None:
    seeds = [still(kind, orientation=6) for kind in KINDS]
    cut = [seed[:length] for seed in seeds for length in (1, 8, 12, 16, 20, 24, 40, 100)]
    found = decode_all([*cut, *mutated(seeds, count, seed=3)], tmp_path / "files", STILL)
    for outcome in found:
        assert_harmless(outcome, tmp_path)
    assert 0.1 < sum(isinstance(outcome, RequestError) for outcome in found) / len(found) < 0.9
