"""Every codec, container and way to store times: the right frames, pixel for pixel, at exact times."""

from __future__ import annotations

import os
import struct
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
import pytest
from av.packet import PacketSideData

from tests.clips import bar_codes, decode_all, number_of, write_video
from tests.component.decoding.reading import read
from vidspec_service.decoding import reader
from vidspec_service.decoding.clip import Clip, FrameRequest
from vidspec_service.decoding.reader.frames import chosen_frames

pytestmark = pytest.mark.component

X264_OPEN_GOP = {"x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=3:b-pyramid=normal:scenecut=0"}
X265_OPEN_GOP = {
    "x265-params": "log-level=none:pools=none:frame-threads=1:open-gop=1:keyint=12:min-keyint=12:bframes=4"
}


def assert_agrees_with_a_plain_decode(clip: Clip, path: Path, time_base: Fraction) -> None:
    """Each chosen frame equals exactly the frame with the same time in a plain decode."""
    shown = decode_all(path)
    ticks = list(shown)
    assert clip.video.source_num_frames == len(ticks)
    times = [float((tick - ticks[0]) * time_base) for tick in ticks]
    assert clip.timestamps_s == tuple(times[i] for i in clip.video.source_indices)
    for index, frame in zip(clip.video.source_indices, clip.video.frames, strict=True):
        assert np.array_equal(frame, shown[ticks[index]])


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt", "time_base"),
    [
        ("a.mp4", "h264", "yuv420p", Fraction(1, 15360)),
        ("a.mkv", "h264", "yuv420p", Fraction(1, 1000)),
        ("a.mov", "h264", "yuv422p10le", Fraction(1, 15360)),
        ("a.ts", "h264", "yuv420p", Fraction(1, 90000)),
        ("a.mp4", "hevc", "yuv420p", Fraction(1, 15360)),
        ("b.mp4", "hevc", "yuv420p10le", Fraction(1, 15360)),
        ("c.mp4", "hevc", "yuv444p12le", Fraction(1, 15360)),
        ("b.ts", "hevc", "yuv420p", Fraction(1, 90000)),
        ("a.webm", "vp8", "yuv420p", Fraction(1, 1000)),
        ("b.webm", "vp9", "yuv420p", Fraction(1, 1000)),
        ("c.webm", "av1", "yuv420p", Fraction(1, 1000)),
        ("d.mp4", "av1", "yuv420p10le", Fraction(1, 15360)),
        ("e.mp4", "mpeg4", "yuv420p", Fraction(1, 15360)),
        ("c.ts", "mpeg2video", "yuv420p", Fraction(1, 90000)),
        ("a.mpg", "mpeg1video", "yuv420p", Fraction(1, 90000)),
        ("b.mov", "prores", "yuv422p10le", Fraction(1, 15360)),
        ("f.mp4", "mjpeg", "yuvj420p", Fraction(1, 15360)),
    ],
)
def test_codecs_and_containers(tmp_path: Path, name: str, codec: str, pix_fmt: str, time_base: Fraction) -> None:
    path = write_video(tmp_path / name, bar_codes(40), codec=codec, pix_fmt=pix_fmt)
    clip = read(path, FrameRequest(num_frames=10))
    assert clip.codec == codec
    assert clip.video.source_indices == (2, 6, 10, 14, 18, 22, 26, 30, 34, 38)
    assert [number_of(frame) for frame in clip.video.frames] == list(clip.video.source_indices)
    assert_agrees_with_a_plain_decode(clip, path, time_base)
    assert clip.video.duration_s == pytest.approx(40 / 30, abs=0.002)
    assert clip.video.source_fps == pytest.approx(30, rel=0.002)
    assert clip.warnings == ()


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("closed.mp4", "h264", {"bf": "3"}),
        ("open.mp4", "h264", X264_OPEN_GOP),
        ("open.ts", "h264", X264_OPEN_GOP),
        ("interlaced.ts", "h264", {"x264-params": "interlaced=1:bframes=3"}),
        ("open.mp4", "hevc", X265_OPEN_GOP),
        ("open.mkv", "hevc", X265_OPEN_GOP),
        ("b.mp4", "mpeg4", {"bf": "2"}),
        ("b.ts", "mpeg2video", {"bf": "2"}),
        ("alt.webm", "vp9", {"auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "good", "cpu-used": "5"}),
    ],
)
@pytest.mark.parametrize("request_", [FrameRequest(num_frames=5), FrameRequest(fps=7), FrameRequest(fps=1000)])
def test_jumping_ahead_and_skipping_frames_changes_no_pixel(
    tmp_path: Path, name: str, codec: str, options: dict[str, str], request_: FrameRequest
) -> None:
    path = write_video(tmp_path / name, bar_codes(100), codec=codec, options=options)
    clip = read(path, request_)
    assert [number_of(frame) for frame in clip.video.frames] == list(clip.video.source_indices)
    with av.open(path) as container:
        time_base = container.streams.video[0].time_base
    assert time_base is not None
    assert_agrees_with_a_plain_decode(clip, path, time_base)


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [("a.mp4", "h264", {}), ("a.mxf", "h264", {"bf": "0"}), ("b.mxf", "mpeg2video", {"bf": "2"})],
)
def test_packets_that_no_chosen_frame_needs_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, codec: str, options: dict[str, str]
) -> None:
    decoded = []

    class Noting:
        def __init__(self, codec: Any) -> None:
            self._codec = codec

        def decode(self, packet: Any) -> Any:
            decoded.append(packet)
            return self._codec.decode(packet)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._codec, name)

    def noting(packets: Any, codec: Any, *rest: Any) -> Any:
        return chosen_frames(packets, cast(Any, Noting(codec)), *rest)

    monkeypatch.setattr(reader, "chosen_frames", noting)
    path = write_video(tmp_path / name, bar_codes(100), codec=codec, gop=10, rate=25, options=options)
    clip = read(path, FrameRequest(num_frames=2))
    assert [number_of(frame) for frame in clip.video.frames] == [25, 75]
    assert len(decoded) < 40


@pytest.mark.parametrize("start", range(0, 100, 7))
def test_any_single_frame_of_a_long_open_gop_clip_is_the_right_one(tmp_path: Path, start: int) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(100), codec="hevc", options=X265_OPEN_GOP)
    clip = read(path, FrameRequest(num_frames=1, start_s=start / 30, end_s=(start + 1) / 30))
    assert clip.video.source_indices == (start,)
    assert number_of(clip.video.frames[0]) == start
    assert clip.timestamps_s == (start * 512 / 15360,)


@pytest.mark.parametrize(("codec", "options"), [("h264", {"bf": "3"}), ("mpeg4", {"bf": "2"}), ("mjpeg", {})])
def test_avi_without_display_times_still_gives_the_right_frames(
    tmp_path: Path, codec: str, options: dict[str, str]
) -> None:
    pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    path = write_video(tmp_path / "a.avi", bar_codes(40), codec=codec, options=options, pix_fmt=pix_fmt)
    clip = read(path, FrameRequest(num_frames=10))
    assert [number_of(frame) for frame in clip.video.frames] == [2, 6, 10, 14, 18, 22, 26, 30, 34, 38]
    assert clip.timestamps_s == tuple(i / 30 for i in clip.video.source_indices)


def test_a_damaged_picture_of_a_camera_that_writes_avi_delays_none_after_it(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.avi", bar_codes(40), codec="mjpeg", pix_fmt="yuvj420p")
    data = bytearray(path.read_bytes())
    pictures = [start for start in range(len(data)) if data.startswith(b"\xff\xd8\xff", start)]
    data[pictures[5] : pictures[6] - 16] = bytes(pictures[6] - 16 - pictures[5])
    path.write_bytes(data)
    clip = read(path, FrameRequest(num_frames=1))
    assert clip.video.source_indices == (20,)
    assert number_of(clip.video.frames[0]) == 20


def test_a_divx_film_in_matroska_has_the_right_frames(tmp_path: Path) -> None:
    """It states decode times only; where frames are reordered, a packet has two and the next one none."""
    source = write_video(tmp_path / "a.mp4", bar_codes(41), codec="mpeg4", options={"bf": "1"})
    path = tmp_path / "a.mkv"
    with av.open(source) as film, av.open(path, "w") as container:
        first, *others = (bytes(packet) for packet in film.demux(video=0) if packet.size)
        no_frame = b"\0\0\1\xb6\x50\x40"
        packets = [first]
        for reference, between in zip(others[::2], others[1::2], strict=True):
            packets += [reference + between, no_frame]
        stream: Any = container.add_stream_from_template(film.streams.video[0])
        bitmap_header = struct.pack("<IiiHH4s5I", 40, 64, 64, 1, 24, b"XVID", 0, 0, 0, 0, 0)
        stream.codec_context.extradata = bitmap_header + stream.codec_context.extradata + b"\0\0\1\xb2DivX503b1393p"
        for index, data in enumerate(packets):
            packet: Any = av.Packet(data)
            packet.stream, packet.time_base = stream, Fraction(1, 30)
            packet.pts = packet.dts = index
            packet.is_keyframe = index == 0
            container.mux(packet)
    path.write_bytes(path.read_bytes().replace(b"V_MPEG4/ISO/ASP", b"V_MS/VFW/FOURCC"))
    clip = read(path, FrameRequest(num_frames=41))
    assert [number_of(frame) for frame in clip.video.frames] == list(range(41))
    assert clip.timestamps_s == tuple(round(index / 30, 3) for index in range(41))
    assert clip.warnings == ()


@pytest.mark.parametrize("name", ["a.asf", "a.mxf"])
def test_other_files_without_display_times_still_give_the_right_frames(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path / name, bar_codes(40), rate=25, options={"bf": "3", "b-pyramid": "normal"})
    clip = read(path)
    assert [number_of(frame) for frame in clip.video.frames] == list(range(40))


@pytest.mark.parametrize(("name", "tune"), [("a.mp4", "zerolatency"), ("a.ts", "zerolatency"), ("a.mp4", "grain")])
def test_a_video_that_is_refreshed_stripe_by_stripe_is_decoded_from_its_start(
    tmp_path: Path, name: str, tune: str
) -> None:
    """FFmpeg marks packets as keyframes after which many more packets are needed for a complete picture."""
    options = {"tune": tune, "intra-refresh": "1"}
    rows, columns = np.mgrid[0:180, 0:320]
    drift = [np.stack([columns + 2 * i, rows + i, rows + columns + 3 * i], -1).astype(np.uint8) for i in range(150)]
    path = write_video(tmp_path / name, drift, gop=40, options=options)
    shown = list(decode_all(path).values())
    last_stripes = FrameRequest(num_frames=1, start_s=4.9)  # none may come out from the last keyframe on
    for request in (FrameRequest(num_frames=1), FrameRequest(num_frames=5), last_stripes):
        clip = read(path, request)
        assert clip.warnings == ()
        for index, frame in zip(clip.video.source_indices, clip.video.frames, strict=True):
            assert np.array_equal(frame, shown[index])


def test_variable_frame_rate_is_read_as_it_is(tmp_path: Path) -> None:
    times_ms = [0, 40, 55, 500, 510, 2000]
    path = write_video(tmp_path / "a.mkv", bar_codes(6), pts=times_ms, time_base=Fraction(1, 1000))
    assert read(path).timestamps_s == tuple(ms / 1000 for ms in times_ms)
    clip = read(path, FrameRequest(fps=2))
    assert clip.timestamps_s == (0.0, 0.5, 0.51, 2.0)  # 0.51 is still on display at 1.0 and 1.5
    assert [number_of(frame) for frame in clip.video.frames] == [0, 3, 4, 5]


def test_a_model_is_told_when_frames_show_where_they_do_not_come_evenly(tmp_path: Path) -> None:
    """Processors take a frame's index over the rate for its time: of a recorded screen that rests this was far off."""
    times_ms = [*range(0, 2000, 100), *range(2000, 30_000, 4000)]
    path = write_video(tmp_path / "a.mkv", bar_codes(len(times_ms)), pts=times_ms, time_base=Fraction(1, 1000))
    clip = read(path, FrameRequest(num_frames=6))
    told = [index / clip.video.source_fps for index in clip.video.source_indices]
    assert told == list(clip.timestamps_s)
    assert clip.video.source_num_frames / clip.video.source_fps == pytest.approx(clip.video.duration_s, abs=0.001)
    assert [number_of(frame) for frame in clip.video.frames] == list(clip.source_indices)
    assert clip.source_fps == pytest.approx(27 / clip.video.duration_s)


def test_times_start_at_the_first_frame_whatever_the_file_starts_with(tmp_path: Path) -> None:
    pts = [900_000 + 3000 * i for i in range(10)]
    path = write_video(tmp_path / "a.ts", bar_codes(10), pts=pts, time_base=Fraction(1, 90_000))
    clip = read(path)
    assert clip.timestamps_s == tuple(3000 * i / 90_000 for i in range(10))
    assert clip.video.duration_s == 10 / 30


@pytest.mark.parametrize(
    ("name", "codec", "starts_s"),
    [
        ("a.ts", "h264", (0, 0)),
        ("a.ts", "hevc", (0, 5000)),
        ("a.ts", "mpeg2video", (1000, 0)),
        ("a.mpg", "mpeg2video", (0, 0)),
        ("a.mpg", "mpeg4", (1000, 0)),
        ("a.mkv", "h264", (0, 0)),
        ("a.webm", "vp8", (0, 0)),
    ],
)
def test_recordings_that_were_joined_show_one_after_the_other(
    tmp_path: Path, name: str, codec: str, starts_s: tuple[int, int]
) -> None:
    """Each has its own clock; a player goes on at once."""
    path, pictures = tmp_path / name, bar_codes(60)
    for start_s, part in zip(starts_s, (pictures[:40], pictures[40:]), strict=True):
        pts = [30 * start_s + i for i in range(len(part))]
        recording = write_video(tmp_path / f"part.{name}", part, codec=codec, pts=pts, time_base=Fraction(1, 30))
        with open(path, "ab") as joined:
            joined.write(recording.read_bytes())
    for num_frames in (60, 7):
        clip = read(path, FrameRequest(num_frames=num_frames))
        assert [number_of(frame) for frame in clip.video.frames] == list(clip.video.source_indices)
        assert clip.timestamps_s == pytest.approx([i / 30 for i in clip.video.source_indices], abs=0.001)
        assert (clip.video.source_num_frames, clip.warnings) == (60, ())
        assert clip.video.duration_s == pytest.approx(2.0, abs=0.001)


def test_an_ogg_file_that_was_appended_is_shown_after_the_first(tmp_path: Path) -> None:
    """Its headers count as frames that cannot be decoded."""
    first, second = (write_video(tmp_path / f"{i}.ogg", bar_codes(60)[i : i + 30], codec="vp8") for i in (0, 30))
    with open(first, "ab") as joined:
        joined.write(second.read_bytes())
    assert [number_of(frame) for frame in read(first).video.frames] == list(range(60))


def test_a_stream_whose_encoder_started_anew_is_decoded_from_any_frame(tmp_path: Path) -> None:
    """As recorders keep live streams. Only the first packet from then on has the new parameters."""
    path = tmp_path / "joined.flv"
    with ExitStack() as files, av.open(path, "w") as joined:
        packets = list[Any]()
        for part, preset in enumerate(("slow", "ultrafast", "slow")):
            pictures, options = bar_codes(60)[20 * part :][:20], {"preset": preset, "bf": "0"}
            written = write_video(tmp_path / f"{part}.flv", pictures, gop=5, options=options)
            file = files.enter_context(av.open(written))
            if part == 0:
                track = joined.add_stream_from_template(file.streams.video[0])
            found = [packet for packet in file.demux(video=0) if packet.size]
            extradata = file.streams.video[0].codec_context.extradata
            assert extradata is not None
            parameters = cast(Any, PacketSideData)(1, len(extradata))
            parameters.update(extradata)
            found[0].set_sidedata(parameters)
            packets += found
        for number, packet in enumerate(packets):
            packet.pts = packet.dts = number * 1000 // 30
            packet.stream = track
            joined.mux(packet)
    for shown in ([0], [13], [27], [38], [42], [58], [19, 21], [38, 42], [25, 45]):
        half = (shown[-1] - shown[0] or 1) / 60  # seconds
        start_s, end_s = shown[0] / 30 - half + 0.005, shown[-1] / 30 + half + 0.005
        clip = read(path, FrameRequest(num_frames=len(shown), start_s=start_s, end_s=end_s))
        assert [number_of(frame) for frame in clip.video.frames] == shown


@pytest.mark.parametrize("bf", ["0", "3"])
def test_frames_without_a_time_do_not_take_the_place_of_those_with_one(tmp_path: Path, bf: str) -> None:
    """A program stream gives a time only to the first frame that begins in a packet."""
    dice = np.random.default_rng(7)
    noise = dice.integers(-12, 13, (60, 128, 192, 1)).astype(np.uint8)  # about a packet for each frame
    noisy = [picture + noise[number] for number, picture in enumerate(bar_codes(60, 192, 128))]
    clip = read(write_video(tmp_path / "a.mpg", noisy, options={"bf": bf}, gop=60))
    assert 30 <= clip.video.source_num_frames < 60
    assert [number_of(frame) for frame in clip.video.frames] == [round(time_s * 30) for time_s in clip.timestamps_s]


def test_a_file_that_gives_few_frames_a_time_does_not_end_early(tmp_path: Path) -> None:
    """Frames are then counted, in ticks that are not the stream's."""
    clip = read(write_video(tmp_path / "a.mpg", bar_codes(60)))
    assert clip.timestamps_s == pytest.approx([i / 30 for i in range(60)])
    assert not any("ends early" in warning for warning in clip.warnings)


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "a.flv", "a.avi"])
def test_sound_that_goes_on_after_the_last_frame_is_no_early_end(tmp_path: Path, name: str) -> None:
    clip = read(
        write_video(tmp_path / name, bar_codes(9), codec="mpeg4" if name == "a.avi" else "h264", with_audio=True),
        FrameRequest(num_frames=9),
    )
    assert clip.video.duration_s == pytest.approx(0.3, abs=0.002)
    assert clip.warnings == ("Audio is ignored.",)


def test_a_pause_before_the_first_frame_is_no_early_end(tmp_path: Path) -> None:
    pts = [60 + i for i in range(30)]
    clip = read(write_video(tmp_path / "a.wmv", bar_codes(30), codec="wmv2", pts=pts, time_base=Fraction(1, 30)))
    assert clip.video.duration_s == pytest.approx(1.0, abs=0.002)
    assert not any("ends early" in warning for warning in clip.warnings)


def test_frames_that_an_edit_list_cuts_are_not_shown(tmp_path: Path) -> None:
    path = write_video(
        tmp_path / "a.mp4",
        bar_codes(30),
        gop=10,
        pts=[512 * (i - 5) for i in range(30)],
        time_base=Fraction(1, 15360),
        muxing={"avoid_negative_ts": "disabled", "use_editlist": "1"},
    )
    clip = read(path)
    assert [number_of(frame) for frame in clip.video.frames] == list(range(5, 30))
    assert clip.timestamps_s[:2] == (0.0, 1 / 30)
    assert clip.video.source_num_frames == 25


def test_a_transport_stream_cut_between_keyframes_starts_at_the_next_one(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.ts", bar_codes(60), gop=20, options={"bf": "0", "sc_threshold": "0"})
    data = whole.read_bytes()
    cut = tmp_path / "cut.ts"
    cut.write_bytes(data[len(data) // 4 // 188 * 188 :])
    clip = read(cut)
    numbers = [number_of(frame) for frame in clip.video.frames]
    assert numbers == list(range(numbers[0], 60))
    assert numbers[0] == 20
    assert clip.timestamps_s[0] == 0.0


@pytest.mark.parametrize(("codec", "options"), [("h264", X264_OPEN_GOP), ("hevc", X265_OPEN_GOP)])
def test_a_video_that_was_cut_without_encoding_it_anew_starts_at_its_first_keyframe(
    tmp_path: Path, codec: str, options: dict[str, str]
) -> None:
    """In an open GOP frames that are stored after the keyframe show before it, and need what was cut off."""
    path = tmp_path / "cut.mkv"
    whole = write_video(tmp_path / "whole.mp4", bar_codes(40), codec=codec, options=options)
    with av.open(whole) as source, av.open(path, "w") as container:
        track = container.add_stream_from_template(source.streams.video[0])
        packets = [packet for packet in source.demux(video=0) if packet.size]
        keyframes = [place for place, packet in enumerate(packets) if packet.is_keyframe]
        for packet in packets[keyframes[1] :]:
            packet.stream = track
            container.mux(packet)
    clip = read(path, FrameRequest(num_frames=1, end_s=0.04))
    assert [number_of(frame) for frame in clip.video.frames] == [12]
    assert (clip.timestamps_s, clip.warnings) == ((0.0,), ())


def test_one_frame_is_a_clip(tmp_path: Path) -> None:
    clip = read(write_video(tmp_path / "a.mp4", bar_codes(1)))
    assert clip.video.frames.shape == (1, 64, 64, 3)
    assert clip.timestamps_s == (0.0,)
    assert clip.video.duration_s == pytest.approx(1 / 30)


def test_a_window_is_honoured(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", bar_codes(60))
    clip = read(path, FrameRequest(fps=10, start_s=0.5, end_s=1.0))
    assert [number_of(frame) for frame in clip.video.frames] == [15, 18, 21, 24, 27]


def test_writing_a_clip_leaves_the_process_scheduled_as_it_was(tmp_path: Path) -> None:
    """An encoder that takes the highest real-time priority once made all tests after it several times slower."""
    before = os.sched_getscheduler(0)
    write_video(tmp_path / "a.webm", bar_codes(2), codec="av1")
    assert os.sched_getscheduler(0) == before
