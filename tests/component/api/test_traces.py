"""A real server's trace of one request: all eight steps, each attributed to its worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.collector import attributes, collecting

_TIMEOUT_S = 120.0
_LONG = 800  # tokens: a draft that gets no core for a while still proposes before the answer ends
_STEPS = {
    ("admit", "api"), ("decode", "api"), ("submit", "api"), ("prefill", "draft"), ("prefill", "target"),
    ("propose", "draft"), ("verify", "target"), ("commit", "target"), ("stream", "api"),
}  # fmt: skip


@pytest.mark.timeout(_TIMEOUT_S)
def test_all_steps_of_a_request_are_traced_from_every_process(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    vidspec = [sys.executable, "-m", "vidspec_service"]
    subprocess.run([*vidspec, "render-clip", "--seed", "6", str(clip)], check=True, timeout=60)
    command = [*vidspec, "serve", "--port", "0", "--log-format", "json"]
    with collecting() as collector:
        command += ["--otlp-traces-endpoint", collector.endpoint]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                ready = next(entry for entry in map(json.loads, process.stderr) if entry["event"] == "ready")
                fields = {"prompt": "Describe the video.", "speculation": "parallel"}
                fields |= {"ignore_eos": "true", "max_tokens": str(_LONG)}
                with clip.open("rb") as video:
                    answer = httpx.post(
                        f"{ready['url']}/v1/video-chat", data=fields, files={"video": video}, timeout=60
                    )
                assert answer.status_code == 200, answer.text
                process.terminate()
                process.communicate(timeout=30)
            finally:
                process.kill()
    spans = {(span.name, attributes(span).get("vidspec.worker")): span for span in collector.spans}
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
    assert said["gen_ai.usage.completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert attributes(spans["commit", "target"])["vidspec.num_tokens"] == said["gen_ai.usage.completion_tokens"]
    assert attributes(spans["propose", "draft"])["vidspec.num_tokens"] > 0
