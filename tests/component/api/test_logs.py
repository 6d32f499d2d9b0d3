"""What a real server writes for a log shipper: one JSON object a line, from its workers as well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_TIMEOUT_S = 120.0
_BOTH = {
    "vidspec_service.engine.ipc.channel",
    "vidspec_service.engine.frontend.supervisor",
}  # of the target's process, of the API's


def _workers(server: int) -> list[int]:
    """Children of the server that hold models; the draft is started last."""
    found = []
    for entry in (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
        with suppress(OSError):  # somebody's process that has ended meanwhile
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server and b"engine.worker" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return sorted(found)


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
                    os.kill(_workers(process.pid)[-1], signal.SIGKILL)
                if {entry["logger"] for entry in entries} >= _BOTH:
                    break
        finally:
            process.kill()
    assert {entry["logger"] for entry in entries} >= _BOTH, entries
