"""The commands as a new user runs them: real processes, the bundled models, a clip on disk."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

_START_TIMEOUT_S = 100.0


def _vidspec(*argv: str) -> list[str]:
    return [sys.executable, "-m", "vidspec_service", *argv]


@pytest.mark.slow
@pytest.mark.timeout(_START_TIMEOUT_S)
def test_check_says_what_runs_where_and_what_the_clip_shows() -> None:
    done = subprocess.run(_vidspec("check"), capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=True)
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert set(rows) >= {"vidspec", "target", "draft", "answer", "truth", "timing", "verdict"}
    assert "the same text; 28 of 28 facts right" in rows["verdict"]


@pytest.mark.slow
@pytest.mark.timeout(3 * _START_TIMEOUT_S)
def test_check_of_a_device_measures_it_with_a_random_pair() -> None:
    command = _vidspec("check", "--device", "cpu", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * _START_TIMEOUT_S, check=True)
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["device"]["identity"] == {"num_answers": 9, "forks": []}
    assert set(found["device"]["speed-up"]) == {"0.7", "0.8", "0.9"}
    assert found["device"]["bandwidth"]["rooflines"]["target"]["step_s"] > 0


def test_a_model_that_cannot_be_loaded_ends_the_start_with_one_line_and_code_2() -> None:
    command = _vidspec("serve", "--port", "0", "--model", "/does/not/exist")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("vidspec: target model '/does/not/exist' is neither a folder")


@pytest.mark.slow
@pytest.mark.timeout(2 * _START_TIMEOUT_S)
def test_a_batch_brings_its_own_server_which_ends_with_it(tmp_path: Path) -> None:
    for seed in (1, 2):
        clip = str(tmp_path / f"{seed}.mp4")
        subprocess.run(_vidspec("render-clip", "--seed", str(seed), clip), check=True, timeout=60)
    answers = tmp_path / "answers.jsonl"
    ask = _vidspec("batch", str(tmp_path), "-o", str(answers), "--prompt", "Describe the video.")
    assert subprocess.run(ask, timeout=_START_TIMEOUT_S, check=False).returncode == 0
    told = [json.loads(line)["response"]["body"] for line in answers.read_text().splitlines()]
    assert len(told) == 2
    assert all(answer["usage"]["completion_tokens"] > 20 for answer in told)

    answers.unlink()
    with subprocess.Popen(ask) as batch:
        (server,) = asyncio.run(_children(psutil.Process(batch.pid)))
        batch.kill()
    server.wait(20)


async def _children(process: psutil.Process) -> list[psutil.Process]:
    while True:
        if found := process.children():
            return list(found)
        await asyncio.sleep(0.02)
