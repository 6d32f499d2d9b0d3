"""Two servers of one pair share a store: if one is killed in mid-stream, the other can give the whole answer."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

_TIMEOUT_S = 120.0
_CUT_AFTER = 40  # text pieces


def _vidspec(*argv: str) -> list[str]:
    return [sys.executable, "-m", "vidspec_service", *argv]


class Server:
    """`vidspec serve` in its own process."""

    def __init__(self, store: Path) -> None:
        command = _vidspec("serve", "--port", "0", "--log-format", "json", "--video-store", f"file://{store}")
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def client(self) -> httpx.Client:
        """A client, once the server is ready."""
        assert self.process.stderr is not None
        lines = (json.loads(line) for line in self.process.stderr if line.startswith("{"))
        return httpx.Client(
            base_url=next(line["url"] for line in lines if line["event"] == "ready"), timeout=_TIMEOUT_S
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


def _heard_until_cut(client: httpx.Client, asked: dict[str, Any], server: Server) -> tuple[str, int]:
    """The text of a stream until its server was killed, and the seed from its headers."""
    pieces: list[str] = []
    with client.stream("POST", "/v1/video-chat", json={**asked, "stream": True}) as answer:
        try:
            for line in answer.iter_lines():
                pieces.append(_said(line))
                if sum(map(bool, pieces)) == _CUT_AFTER:
                    server.kill()
        except httpx.RemoteProtocolError:
            return "".join(pieces), int(answer.headers["x-seed"])
    raise AssertionError("the stream came to its end")


def _said(event: str) -> str:
    if not event.startswith("data: {"):
        return ""
    choices = json.loads(event.removeprefix("data: "))["choices"]
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.slow
@pytest.mark.timeout(_TIMEOUT_S)
def test_another_server_says_the_rest_of_a_killed_ones_answer_word_for_word(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    subprocess.run(_vidspec("render-clip", "--seed", "7", str(clip)), check=True, timeout=_TIMEOUT_S)
    with ExitStack() as held:
        servers = [Server(tmp_path / "videos") for _ in range(2)]
        for server in servers:
            held.callback(server.kill)
        first, second = (held.enter_context(server.client()) for server in servers)
        kept = first.post("/v1/videos", files={"video": clip.read_bytes()}).json()
        asked: dict[str, Any] = {
            "video_id": kept["id"],
            "prompt": "Describe the video.",
            "temperature": 1.0,
            "max_tokens": 400,
            "ignore_eos": True,
        }
        heard, seed = _heard_until_cut(first, asked, servers[0])
        whole = second.post("/v1/video-chat", json={**asked, "seed": seed})
        other = second.post("/v1/video-chat", json={**asked, "seed": seed + 1})
    text = whole.json()["choices"][0]["message"]["content"]
    assert len(text) > len(heard) > _CUT_AFTER
    assert text.startswith(heard)
    assert not other.json()["choices"][0]["message"]["content"].startswith(heard)
