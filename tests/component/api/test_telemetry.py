"""What a real server tells of its work: one JSON object per log line and the trace of a request, from every process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from psutil import Process

from tests.collector import attributes, collecting
from vidspec_service.bench.common.scenes import write_scene

pytestmark = pytest.mark.timeout(120)

_SERVE = [sys.executable, "-m", "vidspec_service", "serve", "--port", "0", "--log-format", "json"]
_LONG = 800  # tokens: a draft that gets no core for a while still proposes before the answer ends
_STEPS = {
    ("admit", "api"), ("decode", "api"), ("submit", "api"), ("prefill", "draft"), ("prefill", "target"),
    ("propose", "draft"), ("verify", "target"), ("commit", "target"), ("stream", "api"),
}  # fmt: skip
_BOTH = {
    "vidspec_models.backends.select",
    "vidspec_service.engine.frontend.supervisor",
}  # one logger of the draft's process, when it is back, and one of the API's


@dataclass(frozen=True)
class Life:
    """What was seen of a server that answered a request, lost its draft, got it back, and was told to end."""

    completion_tokens: int
    spans: list[Span]
    entries: list[dict[str, Any]]  # logged from the draft's death on
    returncode: int


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    clip = tmp_path_factory.mktemp("clip") / "clip.mp4"
    write_scene(6, clip)
    entries: list[dict[str, Any]] = []
    with collecting() as collector:
        command = [*_SERVE, "--otlp-traces-endpoint", collector.endpoint]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                ready = next(entry for entry in map(json.loads, process.stderr) if entry["event"] == "ready")
                completion_tokens = _completion_tokens(ready["url"], clip)
                children = Process(process.pid).children(recursive=True)
                next(each for each in children if each.name() == "vidspec-draft").kill()
                for line in process.stderr:
                    entries.append(json.loads(line))
                    if {entry["logger"] for entry in entries} >= _BOTH:
                        break
                process.send_signal(signal.SIGTERM)
                entries += map(json.loads, process.communicate(timeout=30)[1].splitlines())
            finally:
                process.kill()
    return Life(completion_tokens, collector.spans, entries, process.returncode)


def _completion_tokens(url: str, clip: Path) -> int:
    fields = {"prompt": "Describe the video.", "speculation": "parallel"}
    fields |= {"ignore_eos": "true", "max_tokens": str(_LONG)}
    with clip.open("rb") as video:
        answer = httpx.post(f"{url}/v1/video-chat", data=fields, files={"video": video}, timeout=60)
    assert answer.status_code == 200, answer.text
    num_tokens: int = answer.json()["usage"]["completion_tokens"]
    return num_tokens


def test_every_line_is_json_when_a_worker_dies_and_comes_back(life: Life) -> None:
    assert {entry["logger"] for entry in life.entries} >= _BOTH, life.entries
    assert life.returncode == 0


def test_all_steps_of_a_request_are_traced_from_every_process(life: Life) -> None:
    spans = {(span.name, attributes(span).get("vidspec.worker")): span for span in life.spans}
    whole = spans.pop(("POST /v1/video-chat", None))
    assert set(spans) == _STEPS
    order = [spans[step].start_time_unix_nano for step in (("admit", "api"), ("decode", "api"), ("submit", "api"))]
    order += [spans["prefill", "target"].start_time_unix_nano, spans["verify", "target"].start_time_unix_nano]
    assert order == sorted(order)
    slack_ns = 5_000_000  # between the readings of two clocks
    for span in spans.values():
        assert span.start_time_unix_nano >= whole.start_time_unix_nano - slack_ns
        assert span.end_time_unix_nano <= whole.end_time_unix_nano + slack_ns
    said = attributes(whole)
    assert said["gen_ai.usage.completion_tokens"] == life.completion_tokens
    assert attributes(spans["commit", "target"])["vidspec.num_tokens"] == said["gen_ai.usage.completion_tokens"]
    assert attributes(spans["propose", "draft"])["vidspec.num_tokens"] > 0


def test_a_server_that_is_told_to_end_while_it_loads_ends_itself() -> None:
    """Otherwise it would not end where it is the first process of a container."""
    with subprocess.Popen(_SERVE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert next(entry for entry in map(json.loads, process.stderr) if entry["event"] == "loading")
            process.terminate()
            assert [json.loads(line)["event"] for line in process.stderr if "Traceback" in line] == []
            assert process.wait() == 0
        finally:
            process.kill()
