"""`vidspec chat` against the real application on a fake engine."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import ANSWER, FINISHED, PROMPT_READY, FakeDecodePool, FakeEngine
from tests.unit.cli.live_api import live_api
from vidspec_models.request import Compression, SpeculationMode
from vidspec_service.api.schemas.video_chat import VideoChatForm
from vidspec_service.cli import chat
from vidspec_service.cli.parsing import UsageError, parse
from vidspec_service.engine.types import TextDelta
from vidspec_service.errors import GenerationFailed, VideoUnreadable


def _clip(folder: Path) -> Path:
    path = folder / "secret name.mp4"
    path.write_bytes(b"\x00\x00\x00\x20ftypisom-not-really-a-clip")
    return path


def _chat(video: Path, url: str, *flags: str) -> int:
    command, args = parse(["chat", str(video), "What moves?", "--url", url, *flags])
    return command.run(args)


def test_the_answer_goes_to_stdout_and_the_summary_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    with live_api(tmp_path / "up", engine) as url:
        assert _chat(_clip(tmp_path), url) == 0
    shown = capsys.readouterr()
    assert shown.out == "A red squäre.\n"
    warning, summary = shown.err.splitlines()
    assert warning == "warning: 2 frames could not be decoded"
    assert summary.startswith("5 tokens, ")
    assert summary.endswith("; speculation parallel, 75% accepted; 3 frames of 3.0 s")
    assert engine.requests[0].turns[0].text == "What moves?"


def test_an_answer_cannot_send_escape_sequences_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with live_api(
        tmp_path / "up", FakeEngine(PROMPT_READY, TextDelta(text="Two.\x1b[2J", num_tokens=2), FINISHED)
    ) as url:
        assert _chat(_clip(tmp_path), url) == 0
    assert capsys.readouterr().out == "Two.[2J\n"
    with _listener(400, b'{"error": {"code": "odd", "message": "\\u001b[2J"}}') as url:
        assert _chat(_clip(tmp_path), url) == 1
    assert capsys.readouterr().err == "vidspec chat: odd: [2J (HTTP 400)\n"


def test_a_server_on_this_machine_is_asked_without_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with live_api(tmp_path / "up", FakeEngine()) as url:
        assert _chat(_clip(tmp_path), url) == _chat(_clip(tmp_path), url.replace("127.0.0.1", "localhost")) == 0


@pytest.mark.parametrize(("flag", "choices"), [("compression", Compression), ("speculation", SpeculationMode)])
def test_every_choice_that_the_service_takes_can_be_made_in_the_terminal(
    flag: str, choices: type[Compression | SpeculationMode]
) -> None:
    """The command repeats the list of choices: importing their enum would load numpy before the first output."""
    for choice in choices:
        _, args = parse(["chat", "clip.mp4", "What moves?", f"--{flag}", choice])
        assert getattr(args, flag) == choice
    with pytest.raises(UsageError, match=flag):
        parse(["chat", "clip.mp4", "What moves?", f"--{flag}", "other"])


def test_a_key_comes_from_a_file_or_the_environment_and_never_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "the-key-0123456789abcdef"
    (tmp_path / "key").write_text(f"# mine\n{key}\n")
    with live_api(tmp_path / "up", FakeEngine(), keys=[key]) as url:
        assert _chat(_clip(tmp_path), url) == 1
        assert capsys.readouterr().err.startswith("vidspec chat: invalid_api_key: Send a valid API key")
        assert _chat(_clip(tmp_path), url, "--api-key-file", str(tmp_path / "key")) == 0
        monkeypatch.setenv("VIDSPEC_API_KEYS", key)
        assert _chat(_clip(tmp_path), url) == 0
    with pytest.raises(UsageError, match="did you mean --api-key-file"):
        parse(["chat", "a.mp4", "b", "--api-key", key])


def test_json_prints_what_the_server_answered_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with live_api(tmp_path / "up", FakeEngine()) as url:
        assert _chat(_clip(tmp_path), url, "--json") == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert answer["object"] == "video.chat.completion"
    assert answer["choices"][0]["message"]["content"] == "A red squäre."
    assert shown.err == ""


def test_every_flag_reaches_the_engine_or_the_decoder(tmp_path: Path) -> None:
    engine, decoder = FakeEngine(), FakeDecodePool()
    flags = (
        "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 40 --seed 3 --stop END --stop . "
        "--fps 2.5 --max-frames 6 --start-s 1 --end-s 2.5 --speculation serial --compression none"
    )
    with live_api(tmp_path / "up", engine, decoder) as url:
        assert _chat(_clip(tmp_path), url.removeprefix("http://"), *flags.split()) == 0
    asked = engine.requests[0]
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 40, 3)
    assert (asked.max_tokens, asked.stop) == (7, ("END", "."))
    assert (asked.speculation, asked.compression) == (SpeculationMode.SERIAL, Compression.NONE)
    frames = decoder.requests[0]
    assert (frames.fps, frames.max_frames, frames.start_s, frames.end_s) == (2.5, 6, 1.0, 2.5)


def test_every_flag_is_a_field_of_a_request_and_any_other_field_can_be_named(tmp_path: Path) -> None:
    flags = vars(parse(["chat", "a.mp4", "What moves?"])[1])
    assert flags.keys() - set(chat.NOT_SENT) < set(VideoChatForm.model_fields)
    engine = FakeEngine()
    with live_api(tmp_path / "up", engine) as url:
        fields = ("--field", "presence_penalty=0.5", "--field", 'logit_bias={"1": 2}')
        assert _chat(_clip(tmp_path), url, *fields) == 0
    sampling = engine.requests[0].sampling
    assert (sampling.presence_penalty, sampling.logit_bias) == (0.5, ((1, 2.0),))
    with pytest.raises(UsageError, match="not of the form NAME=VALUE"):
        parse(["chat", "a.mp4", "b", "--field", "n"])


def test_a_field_that_is_given_twice_is_sent_twice(tmp_path: Path) -> None:
    engine = FakeEngine()
    with live_api(tmp_path / "up", engine) as url:
        assert _chat(_clip(tmp_path), url, "--field", "stop_token_ids=1", "--field", "stop_token_ids=2") == 0
    assert set(engine.requests[0].stop_token_ids) == {1, 2}


def test_the_summary_tells_of_each_video_that_a_field_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_api(tmp_path / "up", FakeEngine()) as url:
        kept = httpx.post(f"{url}/v1/videos", files={"video": _clip(tmp_path).read_bytes()}).json()["id"]
        assert _chat(_clip(tmp_path), url, "--field", f"video_id={kept}") == 0
    *warnings, summary = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert summary.endswith("; 3 frames of 3.0 s and 3 frames of 3.0 s")


def test_several_answers_are_not_printed_into_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    with live_api(tmp_path / "up", engine) as url:
        assert _chat(_clip(tmp_path), url, "--field", "n=2") == 2
    assert "--json" in capsys.readouterr().err
    assert engine.requests == []


def test_the_name_of_the_file_is_nobodys_business(tmp_path: Path) -> None:
    bodies: list[bytes] = []
    with _listener(200, b"", bodies) as url:
        _chat(_clip(tmp_path), url)
    assert b"secret" not in bodies[0]
    assert b'filename="video"' in bodies[0]


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_refusal_is_one_line_in_the_servers_words_and_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], json_flag: list[str]
) -> None:
    decoder = FakeDecodePool(VideoUnreadable("There is no video stream in it.", param="video"))
    with live_api(tmp_path / "up", FakeEngine(), decoder) as url:
        assert _chat(_clip(tmp_path), url, *json_flag) == 1
    expected = "vidspec chat: video_unreadable: There is no video stream in it. [video] (HTTP 422)\n"
    assert capsys.readouterr() == ("", expected)


def test_a_failure_in_the_middle_leaves_what_was_said_and_ends_with_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(PROMPT_READY, TextDelta(text="A red", num_tokens=2), GenerationFailed("/secret/path"))
    with live_api(tmp_path / "up", engine) as url:
        assert _chat(_clip(tmp_path), url) == 1
    shown = capsys.readouterr()
    assert shown.out == "A red\n"
    assert shown.err.startswith("vidspec chat: generation_failed: ")


def test_a_stream_that_breaks_off_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _listener(200, b'data: {"choices": []}\n\n') as url:
        assert _chat(_clip(tmp_path), url) == 1
    assert "ended the stream before the answer was complete" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize(
    "body", [b"<html>nginx</html>", b'{"error": "no such page"}', b'{"error": {}}', b"{}", b"[]", b"\xff"]
)
def test_something_else_than_vidspec_is_recognised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], body: bytes
) -> None:
    with _listener(404, body) as url:
        assert _chat(_clip(tmp_path), url, *flags) == 1
    assert "HTTP 404 from" in capsys.readouterr().err


def test_without_a_server_the_message_says_how_to_start_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _chat(_clip(tmp_path), "http://me:secret@127.0.0.1:1") == 1
    told = capsys.readouterr().err
    assert told.startswith("vidspec chat: no server at http://127.0.0.1:1 (")
    assert "`vidspec serve` starts one" in told


def test_a_proxy_is_not_asked_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with live_api(tmp_path / "up", FakeEngine()) as url:
        assert _chat(_clip(tmp_path), url) == 0
    assert _chat(_clip(tmp_path), "http://vidspec.invalid") == 1
    assert "vidspec chat: http://vidspec.invalid cannot be asked: Using SOCKS proxy" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://[", "ftp://here", "http://localhost:99999", "x" * 300])
def test_an_impossible_address_is_a_plain_failure(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _chat(_clip(tmp_path), url) == 1
    assert capsys.readouterr().err.startswith("vidspec chat: ")


def test_silence_ends_after_the_timeout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(asyncio.Event(), *ANSWER)
    with live_api(tmp_path / "up", engine) as url:
        assert _chat(_clip(tmp_path), url, "--timeout-s", "0.3") == 1
    assert "was silent for too long (ReadTimeout)" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_timeout_that_no_socket_accepts_is_refused(seconds: str) -> None:
    with pytest.raises(UsageError, match="--timeout-s: must be above 0"):
        parse(["chat", "clip.mp4", "What moves?", "--timeout-s", seconds])


def test_a_pipe_is_refused_in_plain_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As is a file that grows while it is sent: neither has the length that the request states."""
    reader, writer = os.pipe()
    with open(reader), open(writer, "wb") as clip, live_api(tmp_path / "up", FakeEngine()) as url:
        clip.write(_clip(tmp_path).read_bytes())
        clip.close()
        assert _chat(Path(f"/dev/fd/{reader}"), url) == 1
    assert "changed while it was sent, or is a pipe" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_refused_in_plain_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python makes a surrogate of such a byte on the command line."""
    with live_api(tmp_path / "up", FakeEngine()) as url:
        assert _chat(_clip(tmp_path), url, "--stop", "\udcff") == 1
    assert capsys.readouterr().err == "vidspec chat: '\\udcff' is not valid text\n"


@pytest.mark.parametrize("video", ["missing.mp4", "."])
@pytest.mark.parametrize("prompt", [["What moves?"], []])
def test_a_file_that_cannot_be_read_is_a_usage_error(video: str, prompt: list[str], tmp_path: Path) -> None:
    command, args = parse(["chat", str(tmp_path / video), *prompt, "--url", "http://127.0.0.1:1"])
    with pytest.raises(UsageError, match="cannot read"):
        command.run(args)


@contextmanager
def _listener(status: int, body: bytes, received: list[Any] | None = None) -> Iterator[str]:
    """A server that gives every request the same answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if received is not None:
                received.append(content)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
