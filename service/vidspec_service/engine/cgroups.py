"""What this process may use of the machine's cores and memory: cgroups limit both, and the machine shows all of them.

`docker run --cpus --memory`, Kubernetes' `limits` and systemd's `CPUQuota` and `MemoryMax` are such limits. A container
sees its own at the root; where there is none, the limit is that of our own cgroup or of one above it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def num_cores(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Cores that this process may use, no more than a CPU limit: threads beyond it are all stopped at once."""
    limits = [math.inf]
    for group in _groups(own):
        of_version_1 = [Path("cpu") / group / f"cpu.cfs_{name}_us" for name in ("quota", "period")]
        for files in ([group / "cpu.max"], of_version_1):
            with suppress(OSError):
                quota, period = " ".join((cgroups / file).read_text() for file in files).split()
                limits += [int(quota) / int(period)] if quota not in ("max", "-1") else []
    return max(1, int(min(*limits, len(os.sched_getaffinity(0)))))


def free_memory(cgroups: Path = _CGROUPS, own: Path = _OWN) -> tuple[int, int]:
    """Bytes that are free for this process, and the bytes that they are a part of: the machine's, or a limit's that
    leaves less. What the kernel keeps of files counts as free.
    """
    machine = psutil.virtual_memory()
    found = [(machine.available, machine.total)]
    for group in _groups(own):
        of_version_1 = (Path("memory") / group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        for folder, limit_file, usage_file, prefix in ((group, "memory.max", "memory.current", ""), of_version_1):
            with suppress(OSError, ValueError):  # no such group, or "max"
                limit, used = (int((cgroups / folder / name).read_text()) for name in (limit_file, usage_file))
                facts = dict(line.split() for line in (cgroups / folder / "memory.stat").read_text().splitlines())
                of_files = sum(int(facts.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
                found.append((max(0, limit - used + of_files), limit))
    return min(found)


def _groups(own: Path) -> Iterator[Path]:
    """The root, our own groups of all controllers, and those above them, below where cgroups are mounted."""
    paths = [Path(line.split(":", 2)[2][1:]) for line in own.read_text().splitlines()] if own.exists() else []
    yield from {Path(), *paths, *(above for path in paths for above in path.parents)}
