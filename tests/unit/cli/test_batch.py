"""`vidspec batch` with the real application on a fake engine: every line is answered once, whatever ends a run."""

from __future__ import annotations

import asyncio
import base64
import errno
import http.server
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import httpx
import pytest

from tests.api.chat import IMAGE_BYTES
from tests.api.processes import served
from tests.clips import write_video
from tests.fakes import FakeEngine
from tests.unit.api.limits.test_deadline import run
from tests.unit.cli.live_api import live_api
from tests.unit.cli.test_terminal import Terminal
from vidspec_models.bundled.render import render, slot_times
from vidspec_models.bundled.scene import sample_scene
from vidspec_service import loopback
from vidspec_service.bench.common.server import LocalServer
from vidspec_service.cli import batch_client
from vidspec_service.cli.batch import BatchProgress
from vidspec_service.cli.batch_client import BatchClient, ClientOptions, ServerUnreachable
from vidspec_service.cli.batch_files import OWN_ROUTE, BatchRequest, BatchResult, ResultsFile, open_results
from vidspec_service.cli.parsing import UsageError, parse
from vidspec_service.errors import ConfigError

CLIP = b"\x00\x00\x00\x20ftypisom-not-really-a-clip"


def batch(*argv: str | Path) -> int:
    command, args = parse(["batch", *map(str, argv)])
    return command.run(args)


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def asked(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "body": {"prompt": "What happens?", "video": "clip.mp4", **body}}


def answers(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "clip.mp4").write_bytes(CLIP)
    return tmp_path


def test_every_line_is_answered_and_never_asked_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "answers.jsonl"
    content = [{"type": "text", "text": "And here?"}, {"type": "video_url", "video_url": {"url": "file:clip.mp4"}}]
    openai = {"model": "fake-target", "messages": [{"role": "user", "content": content}]}
    chat = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": openai}
    lines = [asked("own", max_tokens=7, stop=["a", "b"], structured_outputs={"regex": "a+"}), chat]
    requests = write_lines(folder / "requests.jsonl", *lines)
    engine = FakeEngine()
    with live_api(folder / "up", engine) as url:
        assert batch(requests, "-o", output, "--url", url) == 0
        assert batch(requests, "-o", output, "--url", url) == 0
    found = answers(output)
    assert {found[name]["response"]["status_code"] for name in ("own", "chat")} == {200}
    assert found["own"]["response"]["request_id"] != found["chat"]["response"]["request_id"] != ""
    assert found["own"]["response"]["body"]["choices"][0]["message"]["content"] == "A red squäre."
    assert len(engine.requests) == 2
    own = next(request for request in engine.requests if request.turns[0].text == "What happens?")
    assert (own.max_tokens, own.stop, own.grammar is not None) == (7, ("a", "b"), True)
    assert all(len(request.videos) == 1 for request in engine.requests)
    assert capsys.readouterr().err.count("2 answered, 0 refused") == 2


def test_a_line_cut_short_by_a_kill_is_asked_again(folder: Path) -> None:
    output = folder / "answers.jsonl"
    requests = write_lines(folder / "requests.jsonl", asked("one"), asked("two"))
    engine = FakeEngine()
    with live_api(folder / "up", engine) as url:
        assert batch(requests, "-o", output, "--url", url, "--at-once", "1") == 0
        for num_lost, num_asked in ((20, 3), (1, 4)):  # the second is a line without its end
            output.write_bytes(output.read_bytes()[:-num_lost])
            assert batch(requests, "-o", output, "--url", url) == 0
            assert answers(output).keys() == {"one", "two"}
            assert len(engine.requests) == num_asked
        output.write_bytes(output.read_bytes() + bytes(512))  # as a file system may leave it without power
        assert batch(requests, "-o", output, "--url", url) == 0
    assert answers(output).keys() == {"one", "two"}
    assert len(engine.requests) == num_asked


def test_a_run_that_goes_on_leaves_a_link_a_link_and_private_answers_private(folder: Path) -> None:
    (folder / "disk").mkdir()
    output, real = folder / "answers.jsonl", folder / "disk" / "answers.jsonl"
    output.symlink_to(real)
    real.touch(0o600)
    requests = write_lines(folder / "requests.jsonl", asked("one"), asked("two"))
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(requests, "-o", output, "--url", url) == 0
        real.write_bytes(real.read_bytes()[:-20])
        assert batch(requests, "-o", output, "--url", url) == 0
    assert (output.is_symlink(), real.stat().st_mode & 0o777) == (True, 0o600)
    assert answers(real).keys() == {"one", "two"}
    assert [path.name for path in (folder / "disk").iterdir()] == ["answers.jsonl"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"custom_id": "one", "body": {}}', "custom_id 'one' is already used by an earlier line"),
        ("[]", "not a JSON object"),
        ('{"custom_id": "x", "body": {}, "params": 1}', "unknown field 'params'"),
        ('{"custom_id": "x", "url": "/v1/embeddings", "body": {}}', "url must be one of /v1/video-chat"),
        ('{"custom_id": 3, "body": {}}', "custom_id must be"),
        ('{"custom_id": "", "body": {}}', "custom_id must be"),
        ('{"custom_id": "x", "method": "GET", "body": {}}', "method must be POST"),
        ('{"custom_id": "x", "body": []}', "body must be an object"),
        ('{"custom_id": "x", "body": {"stream": true}}', "stream must be false"),
        ('{"custom_id": "x"', "Expecting"),
        ('{"custom_id": "x", "body": ' + "[" * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_a_bad_line_is_told_before_the_first_is_asked(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, why: str
) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    requests.write_text(f"{requests.read_text()}\n{line}\n")
    assert batch(requests, "-o", folder / "answers.jsonl", "--url", "http://127.0.0.1:9") == 2
    assert f"line 3: {why}" in capsys.readouterr().err


def test_a_file_of_another_encoding_is_told_before_the_first_is_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    requests.write_bytes(requests.read_bytes() + b'{"custom_id": "caf\xe9", "body": {}}\n')
    assert batch(requests, "-o", folder / "answers.jsonl", "--url", "http://127.0.0.1:9") == 2
    assert "line 2: 'utf-8' codec can't decode byte 0xe9" in capsys.readouterr().err


def test_a_file_of_requests_that_is_not_there_is_told_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch(folder / "gone.jsonl", "-o", folder / "answers.jsonl", "--url", "http://127.0.0.1:9") == 2
    assert capsys.readouterr().err == f"vidspec batch: {folder / 'gone.jsonl'}: No such file or directory\n"


def test_a_folder_without_clips_says_which_files_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "clip.rm").touch()
    assert batch(tmp_path, "-o", tmp_path / "answers", "--prompt", "x") == 2
    assert "name the files unless they end in .3gp, " in capsys.readouterr().err


@pytest.mark.parametrize("closed", [".", "deep"])
def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    scandir = os.scandir

    def refuse(path: str | Path) -> Any:
        if Path(path) == folder / closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    (folder / "deep").mkdir()
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        batch(folder, "-o", folder / "answers", "--prompt", "x", "--url", "nobody://is-asked")


@pytest.mark.parametrize("flag", ["--prompt=What?", '--body={"max_tokens": 1}'])
def test_a_file_of_requests_says_all_that_is_asked(folder: Path, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    assert batch(requests, "-o", folder / "answers.jsonl", "--url", "http://127.0.0.1:9", flag) == 2
    assert "a .jsonl file allows neither" in capsys.readouterr().err
    for given in ((folder / "clip.mp4",), (requests, requests)):
        assert batch(*given, "-o", folder / "answers.jsonl", "--url", "http://127.0.0.1:9") == 2
        assert "clips need --prompt" in capsys.readouterr().err


def test_what_cannot_be_put_into_a_request_costs_its_line(folder: Path) -> None:
    """Python parses NaN and half a surrogate pair from JSON, but cannot send either."""
    route = "/v1/chat/completions"
    deep: list[Any] = []
    for _ in range(700):  # which Python parses
        deep = [deep]
    odd = {"deep": deep, "number": float("nan"), "character": "\ud800", "video": "\0"}
    bodies = {name: {name: value} for name, value in odd.items()}
    lines = [{"custom_id": name, "url": route, "body": body} for name, body in bodies.items()]
    lines[-1]["url"] = "/v1/video-chat"  # this route has a field for paths
    requests = write_lines(folder / "requests.jsonl", *lines, asked("good"))
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 1
    found = answers(folder / "answers.jsonl")
    assert found["good"]["response"]["status_code"] == 200
    assert [found[name]["error"]["code"] for name in list(bodies)[1:]] == ["not_sendable"] * 3
    error, response = found["deep"]["error"], found["deep"]["response"]
    assert error["code"] == "not_sendable" if error else response["status_code"] == 400  # Python 3.12 can send it


def test_a_line_has_as_many_videos_as_it_names_and_they_may_stand_in_it(folder: Path) -> None:
    (folder / "clip").write_bytes(CLIP)  # its name says nothing of its kind
    inside = "Data:video/mp4;base64," + base64.b64encode(CLIP).decode()
    parts = [{"type": "text", "text": "?"}, {"type": "video_url", "video_url": {"url": "file:clip"}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    lines = [asked("two", video=["clip.mp4", "clip"]), asked("inside", video=inside)]
    lines += [{"custom_id": "chat", "url": "/v1/chat/completions", "body": body}]
    engine, flags = FakeEngine(), ("-o", folder / "answers.jsonl", "--at-once", "1")
    with live_api(folder / "up", engine) as url:
        assert batch(write_lines(folder / "requests.jsonl", *lines), *flags, "--url", url) == 0
    assert [len(request.videos) for request in engine.requests] == [2, 1, 1]


def test_a_clip_is_sent_as_a_video_whatever_a_system_calls_files_of_its_kind(folder: Path) -> None:
    videos, images = ("a.ts", "a.3gp", "a.mxf", "a.gif"), ("a.JPG", "a.jpeg", "a.png", "a.webp")
    for name in (*videos, *images):
        (folder / name).write_bytes(CLIP if name in videos else IMAGE_BYTES)
    parts = [
        {"type": kind, kind: {"url": f"file:{name}"}}
        for kind, names in (("video_url", videos), ("image_url", images))
        for name in names
    ]
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]}
    lines = write_lines(folder / "requests.jsonl", {"custom_id": "a", "url": "/v1/chat/completions", "body": body})
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(lines, "-o", folder / "answers.jsonl", "--url", url) == 0


def test_a_path_beside_a_video_that_stands_in_the_line_is_refused_and_neither_is_left_out(folder: Path) -> None:
    inside = "data:video/mp4;base64," + base64.b64encode(CLIP).decode()
    requests, engine = write_lines(folder / "requests.jsonl", asked("one", video=["clip.mp4", inside])), FakeEngine()
    with live_api(folder / "up", engine) as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 1
    assert answers(folder / "answers.jsonl")["one"]["response"]["body"]["error"]["param"] == "video"
    assert engine.requests == []


def test_a_field_of_null_is_one_that_is_not_there(folder: Path) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one", max_tokens=None, seed=None))
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 0


def test_each_clip_of_a_folder_gets_the_question(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("clips/z.mp4", "clips/a.mp4", "clips/deep/b.MKV", "clips/deep/c.MTS", "clips/notes.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(CLIP)
    engine = FakeEngine()
    with live_api(folder / "up", engine) as url:
        flags = ("--prompt", "What moves?", "--body", '{"max_tokens": 9}', "--at-once", "1")
        assert batch("clips/a.mp4", "clips", "clip.mp4", "-o", "answers.jsonl", "--url", url, *flags) == 0
    asked_in_turn = ["clips/a.mp4", "clips/deep/b.MKV", "clips/deep/c.MTS", "clips/z.mp4", "clip.mp4"]
    assert list(answers(folder / "answers.jsonl")) == asked_in_turn
    assert {(request.turns[0].text, request.max_tokens) for request in engine.requests} == {("What moves?", 9)}


def test_a_server_on_this_machine_is_asked_without_the_proxy_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    flags = ("-o", folder / "answers.jsonl", "--prompt", "x", "--patience-s", "1")
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(folder / "clip.mp4", *flags, "--url", url) == 0


def test_a_clip_is_answered_once_though_its_name_is_not_utf_8(folder: Path) -> None:
    clip, output = folder / "caf\udce9.mp4", folder / "answers.jsonl"
    clip.write_bytes(CLIP)
    engine = FakeEngine()
    with live_api(folder / "up", engine) as url:
        for _ in range(2):
            assert batch(clip, "-o", output, "--url", url, "--prompt", "What moves?") == 0
    assert answers(output)[str(clip)]["response"]["status_code"] == 200
    assert len(engine.requests) == 1


def test_a_pipe_costs_its_line(folder: Path) -> None:
    """As does a file that grows while it is sent: neither has the length that the request states."""
    output, (reader, writer) = folder / "answers.jsonl", os.pipe()
    requests = write_lines(folder / "requests.jsonl", asked("pipe", video=f"/dev/fd/{reader}"), asked("good"))
    with open(reader), live_api(folder / "up", FakeEngine()) as url:
        with open(writer, "wb") as clip:
            clip.write(CLIP)
        assert batch(requests, "-o", output, "--url", url) == 1
    assert answers(output)["pipe"]["error"]["code"] == "file_not_readable"
    assert answers(output)["good"]["response"]["status_code"] == 200


def test_a_folder_named_like_a_clip_is_no_clip(folder: Path) -> None:
    (folder / "takes.mov").mkdir()
    (folder / "takes.mov" / "one.mp4").write_bytes(CLIP)
    (folder / "gone.mp4").symlink_to("nowhere.mp4")
    os.mkfifo(folder / "waits.mp4")
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(folder, "-o", folder / "answers.jsonl", "--prompt", "What?", "--url", url) == 1
    found = {Path(name).name: answer["error"] is None for name, answer in answers(folder / "answers.jsonl").items()}
    assert found == {"clip.mp4": True, "one.mp4": True, "gone.mp4": False}


def test_many_lines_at_once_do_not_run_out_of_descriptors(folder: Path) -> None:
    """A shell allows 1024, which suffices for half of the lines that may be asked at once."""
    requests = write_lines(folder / "requests.jsonl", *(asked(f"line-{number}") for number in range(50)))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with live_api(folder / "up", FakeEngine()) as url:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, before[1]))
        try:
            assert batch(requests, "-o", folder / "answers.jsonl", "--url", url, "--at-once", "50") == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_file_that_is_not_there_costs_its_line_and_is_tried_again(folder: Path) -> None:
    output = folder / "answers.jsonl"
    requests = write_lines(folder / "requests.jsonl", asked("late", video="late.mp4"), asked("there"))
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(requests, "-o", output, "--url", url) == 1
        found = answers(output)
        assert found["there"]["response"]["status_code"] == 200
        assert found["late"]["error"]["code"] == "file_not_readable"
        (folder / "late.mp4").write_bytes(CLIP)
        assert batch(requests, "-o", output, "--url", url) == 0
    assert answers(output)["late"]["response"]["status_code"] == 200


def test_what_the_server_refuses_is_an_answer(folder: Path) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("bad", temperature=-1), asked("good"))
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 1
    found = answers(folder / "answers.jsonl")
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["good"]["response"]["status_code"] == 200


def test_what_was_answered_before_counts_though_no_server_is_started_or_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vidspec_service.bench.common.server.local_server", None)
    requests = write_lines(folder / "requests.jsonl", asked("bad", temperature=-1), asked("good"))
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 1
    capsys.readouterr()
    assert batch(requests, "-o", folder / "answers.jsonl") == 1
    assert "1 answered, 1 refused or failed" in capsys.readouterr().err
    write_lines(requests, asked("good"))
    assert batch(requests, "-o", folder / "answers.jsonl") == 0


def test_results_that_go_to_no_file_are_refused_by_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests, pipe = write_lines(folder / "requests.jsonl", asked("one")), folder / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert batch(requests, "-o", pipe, "--url", "http://127.0.0.1:9") == 2
    os.close(reader)
    assert f"{pipe}: File or stream is not seekable" in capsys.readouterr().err


def test_without_the_key_nothing_is_taken_for_an_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"), asked("two"))
    ask = (requests, "-o", folder / "answers.jsonl", "--url")
    (folder / "key").write_text("the-key-0123456789abcdef")
    with live_api(folder / "up", FakeEngine(), keys=["the-key-0123456789abcdef"]) as url:
        assert batch(*ask, url) == 1
        assert "needs a valid API key (HTTP 401)" in capsys.readouterr().err
        assert (folder / "answers.jsonl").read_bytes() == b""
        assert batch(*ask, url, "--api-key-file", folder / "key") == 0


def test_a_line_that_takes_the_server_too_long_does_not_stop_the_others(folder: Path) -> None:
    output = folder / "answers.jsonl"
    requests = write_lines(folder / "requests.jsonl", asked("slow"), asked("quick"))
    flags = ("--at-once", "1", "--patience-s", "0.1")
    with _busy_server(1, status=504, headers={"x-should-retry": "false"}) as url:
        assert batch(requests, "-o", output, "--url", url, *flags) == 1
        found = [(name, answer["response"]["status_code"]) for name, answer in answers(output).items()]
        assert found == [("slow", 504), ("quick", 200)]
        assert batch(requests, "-o", output, "--url", url, *flags) == 0  # it may have been given more time since
    assert answers(output)["slow"]["response"]["status_code"] == 200


def test_an_address_with_a_path_costs_no_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its 404 would be the answer of every line: with the right address, the same command would ask nothing."""
    output, requests = folder / "answers.jsonl", write_lines(folder / "requests.jsonl", asked("one"))
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(requests, "-o", output, "--url", f"{url.replace('//', '//me:secret@')}/v1") == 1
        assert f" {url}/v1/v1/video-chat is no route of vidspec (HTTP 404)" in capsys.readouterr().err
        assert batch(requests, "-o", output, "--url", url) == 0
    with _busy_server(1, status=308, headers={"location": "https://127.0.0.1:9/"}) as url:
        assert batch(requests, "-o", folder / "others.jsonl", "--url", url) == 1
    assert "is no route of vidspec (HTTP 308)" in capsys.readouterr().err


def test_a_model_that_is_not_served_is_the_answer_of_its_line(folder: Path) -> None:
    other = {"model": "other", "messages": [{"role": "user", "content": "What happens?"}]}
    line = {"custom_id": "one", "url": "/v1/chat/completions", "body": other}
    requests = write_lines(folder / "requests.jsonl", line, asked("two"))
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 1
    found = answers(folder / "answers.jsonl")
    assert {name: answer["response"]["status_code"] for name, answer in found.items()} == {"one": 404, "two": 200}


def test_a_proxy_is_not_asked_for_this_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server of our own would be asked through it, and httpx takes no SOCKS proxy without another package."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 0
    assert batch(requests, "-o", folder / "others.jsonl", "--url", "http://vidspec.invalid") == 1
    assert "SOCKS proxy" in capsys.readouterr().err


@contextmanager
def _busy_server(
    times: int,
    status: int = 503,
    headers: Mapping[str, str] = MappingProxyType({}),
    kind: str = "application/json",
    body: bytes = b"{}",
) -> Iterator[str]:
    """A server that answers the first `times` requests with a status that may pass."""

    class Handler(http.server.BaseHTTPRequestHandler):
        left = times

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            is_busy, Handler.left = Handler.left > 0, Handler.left - 1
            self.send_response(status if is_busy else 200)
            for name, value in headers.items() if is_busy else ():
                self.send_header(name, value)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return None

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("status", [408, 425, 429, 502, 504])
def test_what_a_server_or_a_proxy_before_it_cannot_answer_now_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(batch_client, "_MIN_WAIT_S", 0.01)
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    with _busy_server(1, status) as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 0


def test_a_busy_server_is_asked_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    date = {"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}  # which HTTP allows as well as a number of seconds
    with _busy_server(1, headers=date) as url:
        assert batch(requests, "-o", folder / "more.jsonl", "--url", url) == 0
    for times, headers, patience in ((100, {}, "0.1"), (1, {"retry-after": "60"}, "3")):
        with _busy_server(times, headers=headers) as url:
            ask = (requests, "-o", folder / "others.jsonl", "--url", url, "--patience-s", patience)
            assert batch(*ask) == 1, "not before the time that the server asks for"
    assert "does not answer 'one': HTTP 503; repeat the command to continue" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("retry_after", "why", "expected"),
    [
        (None, "ConnectError refused", [0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 61.5, 91.5]),
        ("2", "HTTP 503", [0, 2, 6, 14, 30, 60, 90]),
        ("600", "HTTP 503", [0, 30, 60, 90]),
    ],
)
def test_a_server_that_does_not_answer_is_asked_more_rarely_each_time_until_patience_ends(
    monkeypatch: pytest.MonkeyPatch, retry_after: str | None, why: str, expected: list[float]
) -> None:
    tried_at = list[float]()

    def now() -> float:
        return asyncio.get_running_loop().time()

    def away(_: httpx.Request) -> httpx.Response:
        tried_at.append(now())
        if retry_after is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(503, headers={"retry-after": retry_after})

    monkeypatch.setattr(batch_client, "monotonic", now)
    monkeypatch.setattr(loopback, "_transport", lambda *_: httpx.MockTransport(away))
    options = ClientOptions(timeout_s=1, patience_s=100, api_key=None, folder=Path(), at_once=1)
    with pytest.raises(ServerUnreachable, match=f"does not answer 'one': {why}"):
        run(BatchClient("localhost", options, lambda _: None).send_all([BatchRequest("one", OWN_ROUTE, {})], print))
    assert tried_at == expected


def test_lines_that_our_own_other_lines_keep_from_their_turn_do_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more lines at once than the server takes from one caller, those that have a place take it again."""
    is_taken, told = False, list[str]()

    async def one_at_a_time(_: httpx.Request) -> httpx.Response:
        nonlocal is_taken
        if is_taken:
            return httpx.Response(429)
        is_taken = True
        await asyncio.sleep(7)
        is_taken = False
        return httpx.Response(200, json={})

    monkeypatch.setattr(batch_client, "monotonic", lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(loopback, "_transport", lambda *_: httpx.MockTransport(one_at_a_time))
    options = ClientOptions(timeout_s=1, patience_s=100, api_key=None, folder=Path(), at_once=2)
    lines = [BatchRequest(str(number), OWN_ROUTE, {}) for number in range(40)]
    client = BatchClient("localhost", options, lambda _: None)
    run(client.send_all(lines, lambda answer: told.append(answer.custom_id)))
    assert sorted(told) == sorted(line.custom_id for line in lines)


def test_a_server_that_is_silent_for_too_long_is_given_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    with live_api(folder / "up", FakeEngine(asyncio.Event())) as url:
        flags = ("--url", url, "--timeout-s", "0.2", "--patience-s", "0")
        assert batch(requests, "-o", folder / "answers.jsonl", *flags) == 1
    assert "does not answer 'one': ReadTimeout" in capsys.readouterr().err


def test_a_page_is_not_taken_for_an_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    with _busy_server(0, kind="text/html") as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 1
    assert "is no route of vidspec" in capsys.readouterr().err
    assert answers(folder / "answers.jsonl") == {}
    with _busy_server(1, 413, kind="text/html", body=b"<html>too large" * 100) as url:  # a proxy's, of a line's size
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 1
    told = answers(folder / "answers.jsonl")["one"]["response"]
    assert (told["status_code"], len(told["body"]["error"]["message"])) == (413, 1000)


def test_an_answer_that_a_proxy_has_garbled_is_asked_for_again(folder: Path) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    with _busy_server(1, 200, {"content-encoding": "gzip"}) as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 0


@pytest.mark.parametrize("has_line_end", [True, False])
def test_a_file_of_something_else_is_not_written_to(
    folder: Path, capsys: pytest.CaptureFixture[str], has_line_end: bool
) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    notes, deep, odd = folder / "notes", folder / "deep", folder / "odd"
    odd.write_text('{"custom_id": "one", response\n{"custom_id": "two", response\n')
    notes.write_text("Ask about the red ball.\n")
    deep.write_text("[" * 100_000 + "\n")
    for path in (requests, notes, deep, odd):
        before = path.read_bytes() if has_line_end else path.read_bytes().rstrip()
        path.write_bytes(before)
        assert batch(requests, "-o", path, "--url", "http://127.0.0.1:9") == 2
        assert "not a result of vidspec batch" in capsys.readouterr().err
        assert path.read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {"clip.mp4", "requests.jsonl", "notes", "deep", "odd"}


def test_an_answer_is_written_however_deeply_it_is_nested(folder: Path) -> None:
    body: dict[str, Any] = {}
    for _ in range(600):
        body = {"in": body}
    path = folder / "answers.jsonl"
    with open_results(path) as results:
        results.add(BatchResult("a", {"status_code": 200, "body": body}, None))
    assert answers(path)["a"]["response"]["body"] == body


def test_answers_are_in_the_file_while_it_is_open_those_of_a_run_before_too(tmp_path: Path) -> None:
    """A kill may come at any time."""
    path = tmp_path / "answers.jsonl"
    with open_results(path) as results:
        results.add(BatchResult("one", {"status_code": 200}, None))
        assert answers(path).keys() == {"one"}
    path.write_bytes(path.read_bytes() + b'{"custom_id": "two", "respo')
    with open_results(path):
        assert answers(path).keys() == {"one"}


def test_a_disk_that_is_full_keeps_all_answers_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "answers.jsonl"
    path.write_bytes(before := b'{"custom_id": "one", "response": {"status_code": 200}}\n{"custom_id": "two", "respo')
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space left"), open_results(path):
        pass
    assert [(each, each.read_bytes()) for each in tmp_path.iterdir()] == [(path, before)]


def test_after_an_answer_that_cannot_be_written_no_more_is_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add, added = ResultsFile.add, list[BatchResult]()

    def refuse_first(results: ResultsFile, answer: BatchResult) -> None:
        added.append(answer)
        if len(added) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(results, answer)

    monkeypatch.setattr(ResultsFile, "add", refuse_first)
    requests = write_lines(folder / "requests.jsonl", *(asked(f"line-{number}") for number in range(20)))
    engine, output = FakeEngine(), folder / "answers.jsonl"
    with live_api(folder / "up", engine) as url:
        assert batch(requests, "-o", output, "--url", url, "--at-once", "2") == 1
    assert f"{output}: No space left on device" in capsys.readouterr().err
    assert len(engine.requests) < 20


def test_every_answer_is_a_line_to_a_reader_that_knows_more_line_ends_than_json(tmp_path: Path) -> None:
    """As Python's `splitlines` does."""
    texts = ["one\x85two\u2028three\u2029four", "squäre 狐"]
    with open_results(tmp_path / "answers.jsonl") as results:
        for text in texts:
            results.add(BatchResult(text, {"status_code": 200}, None))
    assert list(answers(tmp_path / "answers.jsonl")) == texts
    assert "squäre 狐" in (tmp_path / "answers.jsonl").read_text()


def test_a_text_that_begins_like_an_address_is_not_taken_for_a_file(folder: Path) -> None:
    """It may be somebody else's, and the file private."""
    message = {"role": "user", "content": "file:clip.mp4"}
    chat = {"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": [message]}}
    videos = [{"video": "file:clip.mp4"}, {"video": "file://clip.mp4"}]
    own = {"custom_id": "own", "body": {"prompt": "file:clip.mp4", "videos": videos}}
    data = [
        {"type": "input_video", "input_video": {"data": "file:clip.mp4"}},
        {"type": "text", "text": "file:clip.mp4"},
    ]
    part = {**chat, "custom_id": "part", "body": {"messages": [{"role": "user", "content": data}]}}
    requests, engine = write_lines(folder / "requests.jsonl", chat, own, part), FakeEngine()
    with live_api(folder / "up", engine) as url:
        assert batch(requests, "-o", folder / "answers.jsonl", "--url", url, "--at-once", "1") == 0
    asked = [(request.turns[0].text, len(request.videos)) for request in engine.requests]
    assert asked == [("file:clip.mp4", 0), ("file:clip.mp4", 2), ("file:clip.mp4", 1)]


def test_only_in_a_url_is_a_files_name_written_in_percent(folder: Path) -> None:
    paths = [folder / name for name in ("my clip.mp4", "my%20clip.mp4", os.fsdecode(b"caf\xe9.mp4"))]
    for number, path in enumerate(paths):
        path.write_bytes(CLIP + bytes([number]))
    urls = [path.as_uri() for path in paths] + ["file:my%20clip.mp4"]
    line = {"custom_id": "a", "body": {"prompt": "?", "videos": [{"video": url} for url in urls]}}
    with live_api(folder / "up", FakeEngine()) as url:
        assert batch(write_lines(folder / "requests.jsonl", line), "-o", folder / "answers.jsonl", "--url", url) == 0
    videos = answers(folder / "answers.jsonl")["a"]["response"]["body"]["videos"]
    ids = [video["id"] for video in videos]
    assert [ids.index(each) for each in ids] == [0, 1, 2, 1]


def test_nobody_else_writes_to_the_file_meanwhile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither to an intact file nor to one from which half a line was removed."""
    requests, answers = write_lines(folder / "requests.jsonl", asked("one")), folder / "answers.jsonl"
    for left in (b"", b'{"custom_id": "one", "respo'):
        answers.write_bytes(left)
        with open_results(answers) as results:
            assert not results.answered
            assert batch(requests, "-o", answers, "--url", "http://127.0.0.1:9") == 2
            assert "another vidspec batch is writing to it" in capsys.readouterr().err
        assert answers.read_bytes() == b""


def test_a_server_that_is_not_there_is_told_of_before_patience_ends(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"), asked("two"))
    url = "http://me:secret@127.0.0.1:9"  # which nobody else should read in a log
    assert batch(requests, "-o", folder / "answers.jsonl", "--url", url, "--patience-s", "0.7") == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("vidspec batch: http://127.0.0.1:9: ConnectError")
    assert first.endswith("retrying for 0.7 s")
    assert last.startswith("vidspec batch: http://127.0.0.1:9 does not answer ")
    assert last.endswith("repeat the command to continue")


def test_a_terminal_shows_how_many_lines_are_done_and_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with BatchProgress() as tally:
        tally.add_task("asking", total=3, completed=1)
        tally.count(True)
        tally.count(False)
        for _ in range(2):
            tally.warn_once("http://[::1]:9: retrying")
    assert "3/3" in screen.getvalue()
    assert screen.getvalue().count("http://[::1]:9: retrying") == 1


def test_a_server_of_its_own_that_has_ended_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def ended_server() -> Iterator[LocalServer]:
        with subprocess.Popen(["false"], text=True) as process:
            process.wait()
            yield LocalServer("http://127.0.0.1:9", process, deque(["out of memory"]))

    monkeypatch.setattr("vidspec_service.bench.common.server.local_server", ended_server)
    with pytest.raises(ConfigError, match="the server ended with code 1: out of memory"):
        batch(folder / "clip.mp4", "-o", folder / "answers.jsonl", "--prompt", "x", "--patience-s", "2")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://127.0.0.1", "unsupported protocol 'ftp://'"),
        ("http://localhost:80a", "Invalid port: '80a'"),
        ("localhost:99999", "Invalid port: 99999"),
    ],
)
def test_an_address_that_nobody_can_ask_is_told_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str], url: str, why: str
) -> None:
    requests = write_lines(folder / "requests.jsonl", asked("one"))
    assert batch(requests, "-o", folder / "answers.jsonl", "--url", url) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--at-once", "0"), "must be 1 to 1024"),
        (("--at-once", "1025"), "must be 1 to 1024"),
        (("--at-once", "many"), "must be 1 to 1024"),
        (("--body", "[]"), "must be an object"),
        (("--body", "{"), "not JSON"),
        (("--body", "[" * 100_000), "not JSON"),
        (("--body", '{"stream": true}'), "stream must be false: an answer is one line"),
        (("--body", '{"video": "other.mp4"}'), "must not have video or prompt"),
        (("--body", '{"prompt": "What?"}'), "must not have video or prompt"),
        (("--timeout-s", "nan"), "must be above 0"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused(flags: tuple[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        batch("clips", "-o", "x", *flags)


def test_a_cluster_that_is_not_there_is_told_before_anything_is_asked(folder: Path) -> None:
    lines = write_lines(folder / "requests.jsonl", asked("a"))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(ConfigError, match="there is no cluster at"):
            batch(lines, "-o", folder / "answers.jsonl", "--ray-address", address)


def test_a_run_without_a_file_for_the_answers_is_refused() -> None:
    with pytest.raises(UsageError, match="required: -o/--output"):
        batch("clips")


def test_a_server_and_a_cluster_are_not_asked_at_once() -> None:
    with pytest.raises(UsageError, match="not allowed with"):
        batch("clips", "-o", "x", "--url", "http://127.0.0.1:1", "--ray-address", "auto")


@pytest.mark.slow
def test_five_hundred_clips_and_two_kills_leave_every_line_answered_once(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", render(sample_scene(1), slot_times()))
    requests = write_lines(tmp_path / "requests.jsonl", *(asked(f"line-{number}") for number in range(500)))
    output = tmp_path / "answers.jsonl"

    async def has(num_lines: int, run: subprocess.Popen[bytes]) -> None:
        while not output.exists() or output.read_bytes().count(b"\n") < num_lines:
            assert run.poll() is None
            await asyncio.sleep(0.02)

    with served() as server:
        command = [sys.executable, "-m", "vidspec_service", "batch", str(requests), "-o", str(output)]
        command += ["--url", server.url]
        for num_lines in (100, 300):
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as run:
                asyncio.run(has(num_lines, run))
                run.kill()
        assert subprocess.run(command, timeout=120, check=False).returncode == 0
    found = answers(output)
    assert found.keys() == {f"line-{number}" for number in range(500)}
    assert Counter(line["response"]["status_code"] for line in found.values()) == {200: 500}
