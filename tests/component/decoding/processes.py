"""Finds the decode children of this process, as the kernel sees them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

_KEPT = (b"multiprocessing.resource_tracker", b"engine.fork_server")


def children(parent: int | None = None) -> list[int]:
    """Process ids of the children of `parent` (this process), zombies included, oldest first.

    But for those that are kept when other tests have had them: what `multiprocessing` starts beside a spawned process,
    and what workers are forked from.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # gone meanwhile
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
                if int(fields[1]) == (parent or os.getpid()) and not any(name in command for name in _KEPT):
                    found.append(int(entry.name))
    return sorted(found)


async def hanging_child() -> int:
    """The child of a one-worker pool that has the job: the older one, once its successor is there as a spare."""
    async with asyncio.timeout(30):
        while True:
            if len(found := children()) > 1:
                return found[0]
            await asyncio.sleep(0.01)
