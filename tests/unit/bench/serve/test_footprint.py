"""The footprint counts everything that a server holds, and a server that has died is reported."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from vidspec_service.bench.common.server import LocalServer
from vidspec_service.bench.serve.run import MonitoredServer
from vidspec_service.errors import ConfigError


def started(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_footprint_counts_the_whole_tree(tmp_path: Path) -> None:
    (tmp_path / "upload-1").touch()
    child = "print(1, flush=True); input()"
    code = f"import subprocess, sys; input(); subprocess.run([sys.executable, '-c', '{child}'])"
    with started(code) as process:
        monitored = MonitoredServer(LocalServer("", process, deque()), tmp_path)
        before = monitored.footprint()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        during = monitored.footprint()
    assert (before["num_files"], before["num_processes"], during["num_processes"]) == (1, 1, 2)
    assert during["resident_bytes"] > before["resident_bytes"]


def test_a_server_that_has_died_has_no_footprint_but_last_words(tmp_path: Path) -> None:
    with started("") as process:
        monitored = MonitoredServer(LocalServer("", process, deque(["Killed"])), tmp_path)
        assert process.stdout is not None
        process.stdout.read()
        monitored.footprint()  # no error here: under load, lost requests report it
        with pytest.raises(ConfigError, match="ended with code 0: Killed"):
            asyncio.run(monitored.idle_footprint())
