"""A real server's log for a log shipper: one JSON object per line, from its workers as well."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from psutil import Process

from vidspec_service.__main__ import INTERRUPTED

_TIMEOUT_S = 120.0
_BOTH = {
    "vidspec_models.backends.select",
    "vidspec_service.engine.frontend.supervisor",
}  # one logger of the draft's process, when it is back, and one of the API's


@pytest.mark.timeout(_TIMEOUT_S)
def test_a_server_that_is_told_to_end_while_it_loads_ends_itself() -> None:
    """Otherwise it would not end where it is the first process of a container."""
    command = [sys.executable, "-m", "vidspec_service", "serve", "--port", "0", "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert next(entry for entry in map(json.loads, process.stderr) if entry["event"] == "loading")
            process.terminate()
            assert [json.loads(line)["event"] for line in process.stderr if "Traceback" in line] == []
            assert process.wait() == INTERRUPTED
        finally:
            process.kill()


@pytest.mark.timeout(_TIMEOUT_S)
def test_every_line_is_json_when_a_worker_dies_and_comes_back() -> None:
    command = [sys.executable, "-m", "vidspec_service", "serve", "--port", "0", "--log-format", "json"]
    entries: list[dict[str, Any]] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                entries.append(json.loads(line))
                if entries[-1]["event"] == "ready":
                    next(
                        each for each in Process(process.pid).children(recursive=True) if each.name() == "vidspec-draft"
                    ).kill()
                    entries.clear()
                if {entry["logger"] for entry in entries} >= _BOTH:
                    break
        finally:
            process.kill()
    assert {entry["logger"] for entry in entries} >= _BOTH, entries
