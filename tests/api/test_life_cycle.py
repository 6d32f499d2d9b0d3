"""The life of a server as the operating system sees it: signals, exit codes, processes and files."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.api.processes import ROOT, Served, command, served
from tests.api.test_stream import events_of
from tests.clips import bar_codes, write_video

pytestmark = pytest.mark.api

KEY = "the-key-0123456789abcdef"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_video(tmp_path_factory.mktemp("clips") / "clip.mp4", bar_codes(8), rate=8).read_bytes()


def ask(server: Served, clip: bytes, prompt: str, **fields: str) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/video-chat", files={"video": clip}, data={"prompt": prompt, **fields}, timeout=30
    )


def begun_stream(server: Served, clip: bytes) -> tuple[concurrent.futures.Future[str], concurrent.futures.Future[None]]:
    """A stream that waits in mid-answer. Returns futures of its whole text and of its first words."""
    begun: concurrent.futures.Future[None] = concurrent.futures.Future()

    def read() -> str:
        text = ""
        form = {"prompt": "wait", "stream": "true"}
        url = f"{server.url}/v1/video-chat"
        with httpx.stream("POST", url, files={"video": clip}, data=form, timeout=30) as response:
            for piece in response.iter_text():
                text += piece
                if "A red" in text and not begun.done():
                    begun.set_result(None)
        return text

    return concurrent.futures.ThreadPoolExecutor(1).submit(read), begun


def until_red(server: Served) -> None:
    """Wait until the server is not ready, which shows that the signal has arrived."""
    while httpx.get(f"{server.url}/health/ready").status_code == 200:
        pass


def test_a_signal_lets_streams_go_on_until_the_deadline_and_leaves_nothing(tmp_path: Path, clip: bytes) -> None:
    with served("--drain-timeout-s", "1", "--upload-dir", str(tmp_path)) as server:
        kept = httpx.post(f"{server.url}/v1/videos", files={"video": clip}, timeout=30)
        assert kept.status_code == 200, kept.text
        assert kept.json()["duration_s"] == 1.0
        stream, begun = begun_stream(server, clip)
        begun.result(20)
        family = server.family()
        assert len(family) >= 2
        assert len(list(tmp_path.iterdir())) == 1
        server.terminate()
        until_red(server)
        refused = ask(server, clip, "x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        events = events_of(stream.result(20))
        assert (events[-2]["error"]["code"], events[-1]) == ("draining", "[DONE]")
        assert server.wait() == 0
        assert not [pid for pid in family if Path("/proc", str(pid)).exists()]
        assert list(tmp_path.iterdir()) == []


def test_a_second_signal_is_immediate(clip: bytes) -> None:
    with served("--drain-timeout-s", "600") as server:
        _, begun = begun_stream(server, clip)
        begun.result(20)
        family = server.family()
        server.terminate()
        until_red(server)
        server.terminate()
        assert server.wait(10) == 0
        assert not [pid for pid in family if Path("/proc", str(pid)).exists()]


def test_keys_come_from_file_and_environment_and_are_written_nowhere(tmp_path: Path) -> None:
    other = "another-key-0123456789"
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\n\n")
    with served("--api-key-file", str(file), env={**os.environ, "VIDSPEC_API_KEYS": other}) as server:  # noqa: TID251
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        for key in (KEY, other):
            models = httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"})
            assert models.status_code == 200
        command_line = Path("/proc", str(server.process.pid), "cmdline").read_text()
        server.terminate()
        assert server.wait() == 0
    assert len(server.lines) > 4
    assert not [line for line in [*server.lines, command_line] if KEY in line or other in line]


def test_a_bad_key_file_ends_the_start_with_one_line_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("short-key\n")
    done = subprocess.run(
        command("--api-key-file", str(tmp_path / "keys")), capture_output=True, text=True, timeout=60, check=False,
        cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    facts = json.loads(line)  # the same format as the log
    assert (facts["level"], facts["event"]) == ("error", "cannot start")
    assert "16 to 256 printable ASCII characters" in facts["reason"]
    assert "short-key" not in line
