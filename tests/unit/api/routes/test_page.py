"""SampleClips without a renderer: each clip is rendered once, in a bounded time."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vidspec_service.api.routes.page import SampleClip, SampleClips
from vidspec_service.errors import CapacityError


def test_a_clip_is_rendered_once_and_its_caption_can_be_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []

    def render(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        seed, path = command[-2:]
        rendered.append(seed)
        Path(path).write_bytes(b"clip " + seed.encode())
        return subprocess.CompletedProcess(command, 0, stdout=b"A red square moves left.\n")

    async def ask() -> list[SampleClip]:
        clips = SampleClips()
        return [await clips.clip(seed) for seed in (3, 4, 3)]

    monkeypatch.setattr(subprocess, "run", render)
    found = asyncio.run(ask())
    assert [clip.content for clip in found] == [b"clip 3", b"clip 4", b"clip 3"]
    assert {clip.caption for clip in found} == {"A red square moves left."}
    assert rendered == ["3", "4"]


def test_a_machine_without_time_to_render_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float | None, **_: Any) -> None:
        assert timeout is not None
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(CapacityError, match="no time to render"):
        asyncio.run(SampleClips().clip(1))
