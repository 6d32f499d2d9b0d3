"""`vidspec check --device cuda` on a real GPU: two minutes, captured steps, equal ids, near the bandwidth limit."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

_MOST_S = 120.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_gpu_owner_is_told_in_two_minutes() -> None:
    pytest.importorskip("av", reason="the check writes a clip and asks about it")
    started = time.monotonic()
    command = [sys.executable, "-m", "vidspec_service", "check", "--device", "cuda", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - started < _MOST_S
    found = json.loads(done.stdout)["device"]
    assert {path["how"] for path in found["steps"].values()} == {"captured graphs"}
    assert found["identity"]["forks"] == []
    assert found["bandwidth"]["rooflines"]["target"]["of_roofline"] > 0.5
    assert found["memory"]["workers"]["target"]["devices"][0]["weights"] > 0
