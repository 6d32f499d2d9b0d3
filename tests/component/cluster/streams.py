"""Sampled answers of a server, streamed in parallel while something is done to the server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.component.cluster.ray_cluster import until

_ASKED = {"prompt": "Describe the video.", "temperature": "1", "ignore_eos": "true"}
_UNDER_WAY = 5  # text pieces: two answers of 300 tokens have fewer than 20 where they are made in 0.2 s
_TIMEOUT_S = 100.0


def render_clips(folder: Path, number: int) -> list[Path]:
    found = [folder / f"{seed}.mp4" for seed in range(number)]
    for seed, clip in enumerate(found):
        command = [sys.executable, "-m", "vidspec_service", "render-clip", "--seed", str(seed), str(clip)]
        subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    return found


class Stream:
    """A sampled answer, as it arrives."""

    def __init__(self, client: httpx.Client, clip: Path, seed: int, num_tokens: int = 300) -> None:
        self.pieces: list[str] = []
        self.longest_pause_s = 0.0
        self._client, self._clip = client, clip
        self._asked = {**_ASKED, "max_tokens": str(num_tokens), "seed": str(seed), "stream": "true"}

    def listen(self) -> str:
        """Read the stream to its end; returns the whole text."""
        files = {"video": self._clip.read_bytes()}
        with self._client.stream("POST", "/v1/video-chat", data=self._asked, files=files) as answer:
            assert answer.status_code == 200, answer.read()
            heard_at: float | None = None
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                told: dict[str, Any] = json.loads(line.removeprefix("data: "))
                assert "error" not in told, told
                pieces = [text for each in told["choices"] if (text := each["delta"].get("content"))]
                if pieces:
                    now = time.monotonic()
                    self.longest_pause_s = max(self.longest_pause_s, now - (heard_at or now))
                    heard_at = now
                self.pieces += pieces
        return "".join(self.pieces)


def ask_all(
    client: httpx.Client, clips: list[Path], meanwhile: Callable[[], None] = lambda: None, num_tokens: int = 300
) -> tuple[list[str], list[Stream]]:
    """The whole texts, one for each clip; `meanwhile` is called once all answers have begun."""
    streams = [Stream(client, clip, seed, num_tokens) for seed, clip in enumerate(clips)]
    with ThreadPoolExecutor(len(streams)) as pool:
        answers = [pool.submit(stream.listen) for stream in streams]
        until(lambda: all(len(stream.pieces) >= _UNDER_WAY for stream in streams), "all answers to begin")
        meanwhile()
        return [answer.result(_TIMEOUT_S) for answer in answers], streams


def ask_until_done(client: httpx.Client, clips: list[Path], action: Callable[[], None]) -> list[list[str]]:
    """The whole texts for each clip; all clips are asked about in parallel, again and again, until `action` is done."""
    with ThreadPoolExecutor(len(clips) + 1) as pool:
        acting = pool.submit(action)

        def listen(seed: int) -> list[str]:
            texts = []
            while not acting.done():
                texts.append(Stream(client, clips[seed], seed).listen())
            return texts

        answers = [pool.submit(listen, seed) for seed in range(len(clips))]
        acting.result(_TIMEOUT_S)
        return [answer.result(_TIMEOUT_S) for answer in answers]
