"""A bench's own server: reports why it did not start or has ended; sent videos are new to it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from tests.clips import bar_codes, number_of, write_video
from tests.component.decoding.reading import read
from vidspec_service.bench.common import server
from vidspec_service.bench.common.server import cycle_clips, local_server
from vidspec_service.errors import ConfigError


def test_given_files_differ_each_time_and_play_the_same(tmp_path: Path) -> None:
    for name, codec in (("a.mp4", "h264"), ("a.mkv", "h264"), ("a.webm", "vp8"), ("a.avi", "mpeg4"), ("a.ts", "h264")):
        content = write_video(tmp_path / name, bar_codes(4), codec=codec).read_bytes()
        sent = list(itertools.islice(cycle_clips([content], is_repeated=False), 2))
        assert len({content, *sent}) == 3
        (tmp_path / name).write_bytes(sent[1])
        clip = read(tmp_path / name)
        assert [number_of(frame) for frame in clip.video.frames] == [0, 1, 2, 3]
        assert not [warning for warning in clip.warnings if "damage" in warning], name


def test_files_are_told_apart_unless_they_are_to_be_repeated() -> None:
    clips = [b"one", b"another"]
    files = cycle_clips(clips, is_repeated=False)
    assert len({next(files) for _ in range(9)}) == 9
    repeated = cycle_clips(clips, is_repeated=True)
    assert {next(repeated) for _ in range(9)} == set(clips)


def event(name: str, **facts: str) -> str:
    return json.dumps({"event": name, **facts})


def serving(monkeypatch: pytest.MonkeyPatch, said: Sequence[str], then: str) -> None:
    """Replace the server by a process that prints `said` and then runs `then`."""
    code = f"import os, signal, sys, time\nfor line in {list(said)!r}: print(line, file=sys.stderr, flush=True)\n{then}"
    monkeypatch.setattr(server, "_COMMAND", (sys.executable, "-c", code))


UNTIL_ASKED_TO_END = "signal.sigwait({signal.SIGTERM})"
BLOCKED = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"


def test_a_server_is_ready_whatever_else_it_says_and_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["plain", "{half", "[]", event("loading"), event("ready", url="http://x")]
    serving(monkeypatch, [], BLOCKED + f"for line in {said}: print(line, file=sys.stderr)\n" + UNTIL_ASKED_TO_END)
    with local_server() as found:
        assert found.url == "http://x"
        found.check()
    assert found.process.returncode == 0


def test_a_terminals_ctrl_c_does_not_reach_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to its whole process group, and the requests on their way are still to be answered."""
    serving(monkeypatch, [event("ready", url="http://x")], "signal.pause()")
    with local_server() as found:
        assert os.getpgid(found.process.pid) != os.getpgid(0)


def test_a_server_may_end_before_it_listens_for_being_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch, [event("ready", url="http://x")], "signal.pause()")
    with local_server() as found:
        pass
    assert found.process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("said", "then", "told"),
    [
        ([event("cannot start", reason="port 80 is taken")], "sys.exit(2)", "^the server did not start: port 80 is"),
        (["Traceback", "OSError: no space"], "sys.exit(1)", "did not start: OSError: no space"),
        ([], "", "did not start: it logged nothing"),
        ([event("loading")], "signal.pause()", r"was not ready within 0\.5 s: .*loading"),
    ],
)
def test_a_server_that_is_never_ready_is_told_of(
    monkeypatch: pytest.MonkeyPatch, said: list[str], then: str, told: str
) -> None:
    serving(monkeypatch, said, then)
    when_ready = server._when_ready

    def after_all_was_said(url: Future[str], log_tail: deque[str]) -> str:
        while log_tail[0] != said[-1]:  # no event tells of it
            threading.Event().wait(0.001)
        return when_ready(url, log_tail)

    if then == "signal.pause()":
        monkeypatch.setattr(server, "_START_TIMEOUT_S", 0.5)
        monkeypatch.setattr(server, "_when_ready", after_all_was_said)
    with pytest.raises(ConfigError, match=told), local_server():
        raise AssertionError("it was ready")


def test_a_server_that_ends_before_the_block_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch, [event("ready", url="http://x"), "MemoryError"], "os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ConfigError, match="ended with code -9: MemoryError"), local_server() as found:
        found.process.wait()
    with pytest.raises(ConfigError, match="ended with code -9: MemoryError"):
        found.check()


def test_what_went_wrong_in_the_block_comes_before_how_the_server_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch, [event("ready", url="http://x")], "signal.pause()")
    with pytest.raises(KeyError), local_server() as found:
        raise KeyError
    assert found.process.returncode == -signal.SIGTERM


def test_a_server_says_when_it_is_ready_whatever_level_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ready line has level info."""
    asked = "sys.argv[len(sys.argv) - sys.argv[::-1].index('--log-level')]"  # the last flag wins
    ready = event("ready", url="http://x")
    then = f"if {asked} == 'info': print({ready!r}, file=sys.stderr, flush=True)\n"
    serving(monkeypatch, [], then + "signal.pause()")
    monkeypatch.setattr(server, "_START_TIMEOUT_S", 20.0)
    with pytest.raises(KeyError), local_server(["--log-level", "warning"]):
        raise KeyError


def test_a_server_ends_with_a_process_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch, [event("ready", url="http://x")], "signal.pause()")
    code = (
        "import os, signal\nfrom vidspec_service.bench.common import server\n"
        f"server._COMMAND = {server._COMMAND!r}\n"
        "with server.local_server() as found:\n    print(found.process.pid, flush=True)\n    signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(20)
