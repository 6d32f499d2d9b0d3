"""Files that are no video, too large, or broken: each has its own error, in our words, with nothing leaked."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest

from tests.clips import bar_codes, number_of, write_film, write_sound, write_video
from tests.component.decoding.reading import LIMITS, read
from vidspec_service.decoding.clip import FrameRequest
from vidspec_service.decoding.reader import read_clip
from vidspec_service.decoding.reader.container import VIDEO, open_container
from vidspec_service.errors import (
    InvalidRequest,
    RequestError,
    VideoTooLarge,
    VideoUnreadable,
    VideoUnsupported,
)

pytestmark = pytest.mark.component

ONE_FRAME = FrameRequest(num_frames=1)


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("empty.mp4", b"", VideoUnreadable, "empty"),
        ("text.mp4", b"This is not a video.\n" * 50, VideoUnsupported, "text"),
        ("image.mp4", b"\x89PNG\r\n\x1a\n" + bytes(500), VideoUnsupported, "PNG"),
        ("list.mp4", b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:1,\n/etc/passwd\n", VideoUnsupported, "playlist"),
        ("list.m3u8", b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:1,\n/etc/passwd\n", VideoUnsupported, "playlist"),
        ("list.ffconcat", b"ffconcat version 1.0\nfile /etc/passwd\n", VideoUnsupported, "playlist"),
        ("session.sdp", b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\n", VideoUnsupported, "text"),
        ("ftyp.mp4", b"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00isomiso2avc1mp41", VideoUnreadable, "damaged"),
        ("noise.mkv", b"\x1aE\xdf\xa3" + bytes(range(256)) * 8, VideoUnreadable, "damaged"),
        ("noise.ts", (b"\x47" + bytes(range(187))) * 8, RequestError, "The "),
        ("noise.avi", b"RIFF\xff\xff\xff\xffAVI LIST" + b"\xff" * 500, RequestError, "The "),
        ("noise.ogv", b"OggS" + bytes(500), RequestError, "The "),
        ("noise.mpg", b"\x00\x00\x01\xba" + b"\x55" * 500, RequestError, "The "),
    ],
)
def test_files_that_are_no_videos(
    tmp_path: Path, name: str, content: bytes, error: type[RequestError], words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(error, match=words) as caught:
        read(path)
    assert_tells_nothing(caught.value, tmp_path)


def test_a_playlist_that_passed_the_first_check_would_not_open_either(tmp_path: Path) -> None:
    target = write_video(tmp_path / "target.ts", bar_codes(30))
    playlist = tmp_path / "list.m3u8"
    playlist.write_text(f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:1.0,\n{target}\n#EXT-X-ENDLIST\n")
    with av.open(playlist) as container:  # plain FFmpeg reads the other file
        assert container.format.name == "hls"
    with (
        open(playlist, "rb", buffering=0) as file,
        pytest.raises(VideoUnreadable),
        open_container(file, LIMITS, VIDEO),
    ):
        pass


def test_sound_alone_is_not_a_video(tmp_path: Path) -> None:
    with pytest.raises(VideoUnreadable, match="only audio"):
        read(write_sound(tmp_path / "a.m4a"))


def test_a_cover_picture_is_not_a_video(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(path, "w") as container:
        stream = container.add_stream("mjpeg", rate=1)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuvj420p"
        stream.disposition = av.stream.Disposition.attached_pic
        picture = av.VideoFrame.from_ndarray(bar_codes(1)[0], format="rgb24")
        container.mux(stream.encode(picture))
        container.mux(stream.encode())
    with pytest.raises(VideoUnreadable, match="no video track"):
        read(path)


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt"),
    [("a.mov", "jpeg2000", "yuv420p"), ("a.avi", "huffyuv", "rgb24"), ("a.flv", "flashsv", "bgr24")],
)
def test_codecs_off_the_list_are_refused_by_name(tmp_path: Path, name: str, codec: str, pix_fmt: str) -> None:
    path = write_video(tmp_path / name, bar_codes(2), codec=codec, pix_fmt=pix_fmt)
    with pytest.raises(VideoUnsupported, match=f"The video codec is {codec}; accepted are apng, av1"):
        read(path)


@pytest.mark.parametrize(("matrix", "number"), [("YCgCo", 8), ("bt2020c", 10)])
def test_colours_that_cannot_be_converted_are_no_damage(tmp_path: Path, matrix: str, number: int) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(2), options={"x264-params": f"colormatrix={matrix}"})
    with pytest.raises(VideoUnsupported, match=f"colours cannot be converted: pixel format yuv420p, matrix {number} "):
        read(path)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_too_many_tracks_are_refused(tmp_path: Path, name: str) -> None:
    """FFmpeg drops tracks beyond its limit and, in Matroska files, most frames with them."""
    with pytest.raises(VideoUnsupported, match="more than 128 tracks"):
        read(write_film(tmp_path / name, bar_codes(9), num_sounds=128))


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "h264"), ("a.mp4", "hevc"), ("a.webm", "vp9"), ("a.avi", "mpeg4"), ("a.avi", "ffv1")]
)
def test_a_frame_may_have_as_many_pixels_as_the_limit_says_however_lines_are_padded(
    tmp_path: Path, name: str, codec: str
) -> None:
    path = write_video(tmp_path / name, bar_codes(8, 264, 480), codec=codec)
    assert read(path, ONE_FRAME, replace(LIMITS, max_pixels=264 * 480)).video.frames.shape == (1, 480, 264, 3)
    with pytest.raises(VideoTooLarge, match=r"264x480 = 126,720 pixels; the limit is 126,719 \(VIDSPEC_MAX_PIXELS\)"):
        read(path, ONE_FRAME, replace(LIMITS, max_pixels=264 * 480 - 1))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (replace(LIMITS, max_bytes=100), r"The file has [\d,]+ bytes; the limit is 100 \(VIDSPEC_MAX_UPLOAD_BYTES\)."),
        (replace(LIMITS, max_duration_s=1.5), r"lasts 2\.0 s; the limit is 1\.5 s \(VIDSPEC_MAX_DURATION_S\)"),
        (replace(LIMITS, max_pixels=4095), r"64x64 = 4,096 pixels; the limit is 4,095 \(VIDSPEC_MAX_PIXELS\)"),
        (replace(LIMITS, max_source_frames=59), r"more than 59 frames; .* \(VIDSPEC_MAX_SOURCE_FRAMES\)"),
        (
            replace(LIMITS, max_decoded_bytes=30_000),
            r"8 frames of 64x64 pixels take 98,304 bytes \(2 frames would fit\); .* \(VIDSPEC_MAX_DECODED_BYTES\)",
        ),
    ],
)
def test_too_much_names_the_fact_the_limit_and_the_setting(tmp_path: Path, limits: object, words: str) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(60))
    with pytest.raises(VideoTooLarge, match=words):
        read(path, FrameRequest(num_frames=8), limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("width", "height", "max_frame_pixels", "words"),
    [
        (
            1000,
            4,
            4000,
            r"Frames of 1000x4 pixels are too narrow: one side may be 200 times the other at most\. Crop them",
        ),
        (4, 804, 4000, "Frames of 4x804 pixels are too narrow"),
        (800, 4, 1000, "Frames of 800x4 pixels, scaled down to 447x2, are too narrow"),
    ],
)
def test_frames_that_a_model_would_refuse_for_their_shape_are_refused(
    tmp_path: Path, width: int, height: int, max_frame_pixels: int, words: str
) -> None:
    path = write_video(tmp_path / "a.mkv", [np.zeros((height, width, 3), np.uint8)] * 2, codec="ffv1", pix_fmt="bgr0")
    with pytest.raises(VideoTooLarge, match=words):
        read(path, limits=replace(LIMITS, max_frame_pixels=max_frame_pixels))


def test_frames_of_the_most_oblong_shape_pass(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mkv", [np.zeros((4, 800, 3), np.uint8)] * 2, codec="ffv1", pix_fmt="bgr0")
    assert read(path).video.frames.shape[1:] == (4, 800, 3)


def test_exactly_the_limits_pass(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(60))
    limits = replace(
        LIMITS,
        max_bytes=path.stat().st_size,
        max_duration_s=2.0,
        max_pixels=4096,
        max_source_frames=60,
        max_decoded_bytes=8 * 64 * 64 * 3,
    )
    assert len(read(path, FrameRequest(num_frames=8), limits).timestamps_s) == 8


def test_a_start_past_the_end_is_refused_after_the_scan(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"the clip lasts 2\.000 s"):
        read(write_video(tmp_path / "a.mp4", bar_codes(60)), FrameRequest(start_s=2.0))


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("name", ["a.mp4", "fast.mp4", "a.mkv", "a.flv", "a.ts", "a.avi"])
def test_a_file_cut_off_gives_what_is_there_or_says_that_it_is_damaged(tmp_path: Path, name: str, share: float) -> None:
    muxing = {"movflags": "+faststart"} if name == "fast.mp4" else {}
    whole = write_video(tmp_path / name, bar_codes(100, 128, 128), muxing=muxing).read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(whole[: int(len(whole) * share)])
    try:
        clip = read(cut)
    except VideoUnreadable as error:
        assert_tells_nothing(error, tmp_path)
    else:
        # The last frame may be incomplete.
        assert [number_of(frame) for frame in clip.video.frames[:-1]] == list(clip.source_indices[:-1])
        assert name == "a.ts" or clip.video.duration_s > 2 or any("ends early" in w for w in clip.warnings)


def test_damage_in_the_middle_is_survived_or_said(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "a.ts", bar_codes(100, 128, 128), gop=10).read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(20):
        data = bytearray(whole)
        start = int(rng.integers(2000, len(data) - 600))
        data[start : start + 500] = rng.bytes(500)
        path = tmp_path / "damaged.ts"
        path.write_bytes(data)
        try:
            clip = read(path, FrameRequest(num_frames=20))
        except RequestError as error:
            assert_tells_nothing(error, tmp_path)
        else:
            assert 1 <= len(clip.video.frames) <= 20
            assert list(clip.source_indices) == sorted(set(clip.source_indices))


def test_a_frame_of_which_a_part_was_lost_on_the_way_is_said_to_be_damaged(tmp_path: Path) -> None:
    content = write_video(tmp_path / "a.ts", bar_codes(20, 128, 128), codec="mpeg2video").read_bytes()
    packets = [content[start : start + 188] for start in range(0, len(content), 188)]
    lost = next(i for i in range(len(packets) // 2, len(packets)) if packets[i][1:3] == b"\x01\x00")  # no frame's first
    path = tmp_path / "lost.ts"
    path.write_bytes(b"".join(packets[:lost] + packets[lost + 1 :]))
    assert read(path, FrameRequest(num_frames=20)).warnings == ("1 of the 20 chosen frames are damaged.",)


def test_a_frame_that_finds_no_room_is_not_left_half_black(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(3))

    def write(pixels: memoryview | bytes, place: int) -> int:
        return len(pixels) // 2 if place else len(pixels)

    with open(path, "rb", buffering=0) as file, pytest.raises(VideoTooLarge, match="memory"):
        read_clip(file, FrameRequest(num_frames=3), LIMITS, write)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
def test_flipped_bytes_never_raise_anything_unforeseen(tmp_path: Path, name: str) -> None:
    whole = write_video(tmp_path / name, bar_codes(12)).read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(60):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 12):
            data[place] = rng.integers(256)
        path = tmp_path / "mutated"
        path.write_bytes(data)
        try:
            read(path, ONE_FRAME)
        except RequestError as error:
            assert_tells_nothing(error, tmp_path)


def test_a_file_that_points_where_no_file_reaches_is_used_up_to_there(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(240), muxing={"movflags": "frag_keyframe+empty_moov"})
    whole = path.read_bytes()
    first, last = (find(b"tfhd") + 12 for find in (whole.index, whole.rindex))  # where a fragment's data begin
    path.write_bytes(whole[:last] + struct.pack(">Q", 1 << 62) + whole[last + 8 :])
    clip = read(path)
    assert "The file is damaged; nothing after the damage is used." in clip.warnings
    assert 200 < len(clip.video.frames) < 240
    path.write_bytes(whole[:first] + struct.pack(">Q", 1 << 62) + whole[first + 8 :])
    with pytest.raises(VideoUnreadable, match="cannot be opened"):
        read(path)


def assert_tells_nothing(error: RequestError, directory: Path) -> None:
    """The error contains no path, no address, no FFmpeg text."""
    text = f"{error.message} {error.args}"
    assert str(directory) not in text
    assert not re.search(r"0x[0-9a-f]{4}|Errno|avcodec|Invalid data|ffmpeg", text, re.IGNORECASE)
    assert error.__cause__ is None
