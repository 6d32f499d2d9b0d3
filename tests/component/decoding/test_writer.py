"""Written clips can be read back as the same clip, and no partial file is left."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest

from tests.clips import Picture, bar_codes, number_of
from tests.component.decoding.reading import read
from vidspec_service.decoding.writer import write_clip

pytestmark = pytest.mark.component


def test_a_written_clip_reads_back_as_it_was(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", bar_codes(25), 12.5)
    clip = read(tmp_path / "a.mp4")
    assert [number_of(frame) for frame in clip.video.frames] == list(range(25))
    assert clip.timestamps_s == tuple(i / 12.5 for i in range(25))
    assert (clip.codec, clip.video.source_fps, clip.video.duration_s) == ("h264", 12.5, 2.0)


def test_browsers_can_play_it_from_the_first_byte(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mp4", bar_codes(5), 8)
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    with av.open(tmp_path / "a.mp4") as container:
        assert container.streams.video[0].pix_fmt == "yuv420p"


def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4"):
        write_clip(tmp_path / name, bar_codes(30), 30)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def broken() -> Iterator[Picture]:
    yield from bar_codes(3)
    raise KeyError


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([], ValueError),
        ([*bar_codes(2), bar_codes(1, 32, 32)[0]], ValueError),
        (bar_codes(2, 63, 63), ValueError),  # yuv420p needs even sides
        (broken(), KeyError),
    ],
)
def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, frames: list[Picture], error: type[Exception]
) -> None:
    (tmp_path / "a.mp4").write_bytes(b"before")
    with pytest.raises(error):
        write_clip(tmp_path / "a.mp4", frames, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == b"before"


def test_a_full_disk_is_an_os_error_that_names_the_file(tmp_path: Path) -> None:
    """Which the command line tells in one line: as a ValueError, it ended a bench with a traceback."""
    (tmp_path / ".a.mp4.partial.mp4").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_clip(tmp_path / "a.mp4", bar_codes(3), 8)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "a.mp4"))
    assert list(tmp_path.iterdir()) == []


def test_frames_need_not_be_contiguous(tmp_path: Path) -> None:
    wide = np.repeat(np.stack(bar_codes(3)), 2, axis=2)
    write_clip(tmp_path / "a.mp4", iter(wide[:, :, ::2]), 10)
    assert [number_of(frame) for frame in read(tmp_path / "a.mp4").video.frames] == [0, 1, 2]
