"""`vidspec chat` without a question: a conversation with the real application on a fake engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest

from tests.fakes import ANSWER, FakeEngine
from tests.unit.cli.live_api import live_api
from vidspec_service.cli.chat_client import ChatClient, Video
from vidspec_service.cli.parsing import UsageError, parse
from vidspec_service.errors import GenerationFailed

Line = str | Callable[[], str]


class _Typed:
    """What a user types; a line may first do something."""

    def __init__(self, *lines: Line, is_terminal: bool = False) -> None:
        self._lines = iter(lines)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def readline(self) -> str:
        line = next(self._lines, "")
        return line if isinstance(line, str) else line()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def url(tmp_path: Path, engine: FakeEngine) -> Iterator[str]:
    with live_api(tmp_path / "up", engine) as url:
        yield url


@pytest.fixture
def talk(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with these lines on stdin; returns its exit code."""
    video = tmp_path / "clip.mp4"
    video.write_bytes(b"\x00\x00\x00\x20ftypisom-not-really-a-clip")

    def run(*lines: Line, is_terminal: bool = False, flags: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr("sys.stdin", _Typed(*lines, is_terminal=is_terminal))
        command, args = parse(["chat", str(video), "--url", url, *flags])
        return command.run(args)

    return run


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the videos that the command has sent."""
    ids: list[str] = []
    keep = ChatClient.keep

    def noted(client: ChatClient, video: BinaryIO) -> dict[str, Any]:
        facts = keep(client, video)
        ids.append(facts["id"])
        return facts

    monkeypatch.setattr(ChatClient, "keep", noted)
    return ids


def _said(engine: FakeEngine) -> list[list[tuple[str, str]]]:
    return [[(turn.role, turn.text) for turn in request.turns] for request in engine.requests]


def test_each_question_comes_with_all_that_was_said_and_the_video_is_sent_once(
    engine: FakeEngine, talk: Callable[..., int], capsys: pytest.CaptureFixture[str], kept: list[str]
) -> None:
    assert talk("What moves?\n", " \n", "Where to?", flags=("--max-tokens", "9")) == 0
    first = ("user", "What moves?")
    assert _said(engine) == [[first], [first, ("assistant", "A red squäre."), ("user", "Where to?")]]
    assert {request.max_tokens for request in engine.requests} == {9}
    shown = capsys.readouterr()
    assert shown.out == "A red squäre.\n" * 2
    assert shown.err.startswith("clip.mp4: 3.0 s, 6 x 4, h264\n")
    assert len(kept) == 1


def test_a_question_that_failed_is_forgotten_and_the_next_one_can_be_asked(
    engine: FakeEngine, talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> str:
        engine.script = (GenerationFailed("the target died"),)
        return "What moves?\n"

    def works() -> str:
        engine.script = ANSWER
        return "Where to?\n"

    assert talk(fails, works) == 0
    assert _said(engine)[1] == [("user", "Where to?")]
    assert "vidspec chat: " in capsys.readouterr().err
    assert talk(works, fails) == 1, "the last question failed"


def test_an_answer_that_is_stopped_is_forgotten_and_the_next_one_can_be_asked(
    engine: FakeEngine, talk: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ChatClient.stream

    def stopped(client: ChatClient, video: Video, fields: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """As Ctrl-C does, after the first words."""
        for chunk in whole(client, video, fields):
            yield chunk
            if chunk["choices"][0]["delta"].get("content"):
                raise KeyboardInterrupt

    def stops() -> str:
        monkeypatch.setattr(ChatClient, "stream", stopped)
        return "What moves?\n"

    def goes_on() -> str:
        monkeypatch.setattr(ChatClient, "stream", whole)
        return "Where to?\n"

    assert talk(stops, goes_on) == 0
    assert _said(engine)[1] == [("user", "Where to?")]
    shown = capsys.readouterr()
    assert shown.out == "A red\nA red squäre.\n"
    assert "stopped\n" in shown.err


def test_ctrl_c_while_typing_drops_the_line_and_not_the_conversation(
    engine: FakeEngine, talk: Callable[..., int]
) -> None:
    def dropped() -> str:
        raise KeyboardInterrupt

    assert talk("What moves?\n", dropped, "Where to?\n", is_terminal=True) == 0
    assert max(map(len, _said(engine))) == 3, "the server may read the video meanwhile, or later"
    with pytest.raises(KeyboardInterrupt):
        talk("What moves?\n", dropped)


def test_a_video_that_the_server_has_forgotten_is_sent_again(
    engine: FakeEngine, talk: Callable[..., int], url: str, kept: list[str]
) -> None:
    def after_an_hour() -> str:
        assert httpx.delete(f"{url}/v1/videos/{kept[0]}").is_success
        return "Where to?\n"

    assert talk("What moves?\n", after_an_hour) == 0
    assert len(_said(engine)[1]) == 3
    assert len(kept) == 2


def test_the_server_reads_the_video_while_a_user_types_and_a_pipe_gets_its_answers_only(
    engine: FakeEngine, talk: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def typed() -> str:
        for _ in range(500):
            if engine.requests:
                break
            threading.Event().wait(0.02)
        return "What moves?\n"

    assert talk(typed, is_terminal=True) == 0
    assert [request.max_tokens for request in engine.requests] == [1, None]
    assert _said(engine)[1] == [("user", "What moves?")], "the server's reading is no part of the conversation"
    assert "Ctrl-D ends" in capsys.readouterr().err
    engine.requests.clear()
    assert talk("What moves?\n") == 0
    assert len(engine.requests) == 1
    shown = capsys.readouterr()
    assert shown.out == "A red squäre.\n"
    assert "Ctrl-D" not in shown.err


def test_a_stdin_without_a_question_or_with_other_bytes_is_a_usage_error(
    engine: FakeEngine, talk: Callable[..., int]
) -> None:
    with pytest.raises(UsageError, match="no question"):
        talk(" \n")
    with pytest.raises(UsageError, match="not valid text"):
        talk(lambda: b"\xff".decode())
    assert talk(is_terminal=True) == 0, "the user has changed their mind"


def test_json_needs_a_question(talk: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(flags=("--json",)) == 2
    assert "--json needs a PROMPT" in capsys.readouterr().err
