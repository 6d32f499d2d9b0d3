"""`vidspec batch` on a cluster: every line is answered once, whatever dies, with the text of a single server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.component.cluster.ray_cluster import (
    RayCluster,
    command_of,
    end,
    kill,
    running_cluster,
    server_alone,
    until,
)
from tests.component.cluster.streams import render_clips

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_CLIPS = 60
QUESTIONS = ("Describe the video.", "How many objects are there?", "Which colours are there?")
VARIABLES = {
    "ENGINES": "2",
    "ENGINE_GPUS": "1",
    "ENGINE_CPUS": "0",
    "TARGET_DTYPE": "float32",
    "DRAFT_DTYPE": "float32",
}


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with running_cluster() as cluster:
        cluster.add_node(num_cpus=2)
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=1)
        yield cluster


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Three questions about each of a few clips, and one about a clip that does not exist."""
    clips = [clip.name for clip in render_clips(tmp_path, NUM_CLIPS // len(QUESTIONS))]
    sampled = {"max_tokens": 60, "temperature": 1, "seed": 5}
    bodies: list[dict[str, Any]] = [
        {"video": c, "prompt": question, **sampled} for c in clips for question in QUESTIONS
    ]
    bodies.append({"video": "no.mp4", "prompt": "What happens?"})
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps({"custom_id": str(n), "body": body}) + "\n" for n, body in enumerate(bodies)))
    return path


def texts(path: Path) -> dict[str, str | None]:
    """The answer of every line; asserts that no line occurs twice."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: _text(line["response"]) for line in lines}


def _text(response: dict[str, Any] | None) -> str | None:
    if response is None:
        return None
    text: str = response["body"]["choices"][0]["message"]["content"]
    return text


def batch(requests: Path, output: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "vidspec_service",
        "batch",
        str(requests),
        "-o",
        str(output),
        "--at-once=4",
        *flags,
    ]
    environment = {**os.environ, **{f"VIDSPEC_{name}": value for name, value in VARIABLES.items()}}  # noqa: TID251
    return subprocess.Popen([*command, *flags], env=environment, start_new_session=True)


def servers(cluster: RayCluster) -> list[psutil.Process]:
    """The servers that Ray Data started."""
    return [each for each in cluster.processes() if "vidspec_service serve --port 0" in command_of(each)]


def num_answered(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def test_lines_are_answered_once_whatever_is_killed(cluster: RayCluster, requests: Path, tmp_path: Path) -> None:
    output, flag = tmp_path / "answers.jsonl", f"--ray-address={cluster.address}"
    first = batch(requests, output, flag)
    until(lambda: num_answered(output) > 0 or first.poll() is not None, "the first answers")
    end(first)
    assert 0 < num_answered(output) < NUM_CLIPS
    second = batch(requests, output, flag)
    until(lambda: len(servers(cluster)) == 2, "two servers")
    kill(servers(cluster)[0])  # while it starts
    answered = num_answered(output)
    until(lambda: num_answered(output) > answered or second.poll() is not None, "more answers")
    kill(servers(cluster)[0])
    # 1: one line could not be answered. Lines that the first run answered are not asked again.
    assert second.wait(300) == 1
    found = texts(output)
    assert {name for name, text in found.items() if text is None} == {str(NUM_CLIPS)}
    until(lambda: not servers(cluster), "the servers' end")
    with server_alone() as alone:
        alone_output = tmp_path / "alone.jsonl"
        assert batch(requests, alone_output, f"--url={alone.base_url}").wait(300) == 1
    assert found == texts(alone_output)


def test_a_setting_that_no_server_can_have_is_told_and_the_cluster_left(
    cluster: RayCluster, requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIDSPEC_MODEL", "not_a_model")
    run = batch(requests, tmp_path / "answers.jsonl", f"--ray-address={cluster.address}")
    assert run.wait(120) in (1, 2)
    assert num_answered(tmp_path / "answers.jsonl") == 0
