"""CPU seconds of processes, to show that workers whose turn it is not do not compute."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_AFTER_NAME = slice(11, 13)  # utime and stime, counted after the name in parentheses
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time so far, all threads; processes that are gone count nothing."""
    return sum(_cpu_s(pid) for pid in pids)


def _cpu_s(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    ticks = stat.rpartition(")")[2].split()[_AFTER_NAME]
    return sum(map(int, ticks)) / _TICKS_PER_S
