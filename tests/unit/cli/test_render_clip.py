"""`vidspec render-clip` writes a playable file that matches its caption."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.questions import questions
from vidspec_models.bundled.render import render
from vidspec_models.bundled.scene import sample_scene
from vidspec_service.cli.parsing import UsageError, parse
from vidspec_service.decoding.clip import Clip, DecodingLimits, FrameRequest
from vidspec_service.decoding.pool import DecodePool


def _render(*argv: str) -> int:
    command, args = parse(["render-clip", *argv])
    return command.run(args)


async def _decode(path: Path) -> Clip:
    async with DecodePool(DecodingLimits(), 1) as pool:
        return await pool.decode(path, FrameRequest(num_frames=64))


def test_the_clip_has_64_frames_in_4_seconds_and_they_look_like_the_scene(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "clip.mp4"
    assert _render("--seed", "7", str(output)) == 0
    assert capsys.readouterr() == (caption(sample_scene(7)) + "\n", "")
    clip = asyncio.run(_decode(output))
    assert (clip.video.source_num_frames, clip.video.source_fps, clip.video.duration_s) == (64, 16.0, 4.0)
    assert clip.video.frames.shape == (64, 256, 256, 3)
    assert clip.codec == "h264"
    truth = render(sample_scene(7), (np.arange(64) + 0.5) / 64, 256)
    assert np.abs(clip.video.frames.astype(int) - truth).mean() < 4


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.mp4", "b.mp4")]
    for path in paths:
        _render(str(path), "--seed", "3")
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_questions_come_with_their_true_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _render("--seed", "7", "--questions", str(tmp_path / "clip.mp4"))
    lines = capsys.readouterr().out.splitlines()[1:]
    for line, question in zip(lines, questions(sample_scene(7)), strict=True):
        assert line.split(maxsplit=1)[1] == f"{question.text}  {question.answer}"


def test_a_seed_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="--seed: must be 0 or more, not -1"):
        parse(["render-clip", "--seed", "-1", "a.mp4"])


@pytest.mark.parametrize("name", ["no/such/folder/a.mp4", "."])
def test_a_folder_is_told_from_a_file(name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*: .*is (not )?a folder"):
        parse(["render-clip", "--seed", "1", name])


@pytest.mark.parametrize("name", ["a", "a.xyz", "a.mp3"])
def test_what_cannot_be_written_is_code_2_and_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _render("--seed", "1", name) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"vidspec render-clip: cannot write {name}: ")
    assert "end in .mp4" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
