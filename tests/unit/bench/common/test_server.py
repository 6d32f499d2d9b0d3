"""What a server is sent is new to it, and nothing that it holds is overlooked."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

from tests.clips import bar_codes, number_of, write_video
from tests.component.decoding.reading import read
from vidspec_service.bench.common.server import Server, endless


def test_given_files_differ_each_time_and_play_the_same(tmp_path: Path) -> None:
    for name, codec in (("a.mp4", "h264"), ("a.mkv", "h264"), ("a.webm", "vp8"), ("a.avi", "mpeg4"), ("a.ts", "h264")):
        content = write_video(tmp_path / name, bar_codes(4), codec=codec).read_bytes()
        sent = list(itertools.islice(endless([content], is_repeated=False), 2))
        assert len({content, *sent}) == 3
        (tmp_path / name).write_bytes(sent[1])
        clip = read(tmp_path / name)
        assert [number_of(frame) for frame in clip.video.frames] == [0, 1, 2, 3]
        assert not [warning for warning in clip.warnings if "damage" in warning], name


def test_files_are_told_apart_unless_they_are_to_be_repeated() -> None:
    clips = [b"one", b"another"]
    files = endless(clips, is_repeated=False)
    assert len({next(files) for _ in range(9)}) == 9
    repeated = endless(clips, is_repeated=True)
    assert {next(repeated) for _ in range(9)} == set(clips)


def test_a_footprint_counts_the_whole_tree(tmp_path: Path) -> None:
    (tmp_path / "upload-1").touch()
    server = Server(url="", pid=os.getpid(), upload_dir=tmp_path)
    before = server.footprint()
    assert before["num_files"] == 1
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = server.footprint()
    assert during["num_processes"] == before["num_processes"] + 2
    assert during["resident_bytes"] > before["resident_bytes"]
