"""Cores and memory are those of the tightest limit that is above this process."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from vidspec_service.engine.cgroups import free_memory, num_cores

MACHINE = SimpleNamespace(available=6000, total=8000)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_threads_follow_a_containers_cpu_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content + "\n")
    assert num_cores(tmp_path) == expected


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/system.slice/vidspec.service", {"system.slice/vidspec.service/cpu.max": "300000 100000"}),
        ("0::/system.slice/vidspec.service", {"system.slice/cpu.max": "300000 100000"}),
        (
            "2:cpuset:/\n1:cpu:/some",
            {"cpu/some/cpu.cfs_quota_us": "300000", "cpu/some/cpu.cfs_period_us": "100000"},
        ),
    ],
)
def test_threads_follow_the_cpu_limit_of_a_systemd_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "own").write_text(own + "\n")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert num_cores(tmp_path, tmp_path / "own") == 3


def write(folder: Path, limit: str, used: str, active: int = 0, inactive: int = 0, version: int = 2) -> None:
    """Write a memory cgroup's files."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    folder.mkdir(parents=True, exist_ok=True)
    stat = f"anon 1\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}"
    for name, content in (*zip(names, (limit, used), strict=True), ("memory.stat", stat)):
        (folder / name).write_text(content + "\n")


@pytest.mark.parametrize(
    ("limit", "used", "version", "expected"),
    [
        ("max", "100", 2, (6000, 8000)),
        ("9223372036854771712", "100", 1, (6000, 8000)),
        ("3000", "1000", 2, (2300, 3000)),  # what is kept of files, 100 and 200, can be forgotten
        ("3000", "1000", 1, (2300, 3000)),
        ("3000", "3400", 2, (0, 3000)),  # just lowered
        ("7000", "100", 2, (6000, 8000)),  # the machine itself has less
    ],
)
@pytest.mark.parametrize("group", ["", "system.slice/vidspec.service", "system.slice"])
def test_free_memory_is_what_the_tightest_limit_leaves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    used: str,
    version: int,
    expected: tuple[int, int],
    group: str,
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)
    folder = tmp_path / "memory" / group if version == 1 else tmp_path / group
    write(folder, limit, used, active=100, inactive=200, version=version)
    (tmp_path / "own").write_text("4:memory:/system.slice/vidspec.service\n0::/system.slice/vidspec.service\n")
    assert free_memory(tmp_path, tmp_path / "own") == expected


def test_without_cgroups_the_machines_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)
    assert free_memory(tmp_path, tmp_path / "own") == (6000, 8000)


def test_a_kernel_that_tells_less_of_what_is_used_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: MACHINE)
    write(tmp_path, "3000", "1000", active=100, inactive=200)
    (tmp_path / "memory.stat").write_text("anon 1\n")
    assert free_memory(tmp_path, tmp_path / "own") == (2000, 3000)
