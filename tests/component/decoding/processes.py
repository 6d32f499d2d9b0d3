"""Finds the decode children of this process, as the kernel sees them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path


def children(parent: int | None = None) -> list[int]:
    """Process ids of the children of `parent` (this process), zombies included, oldest first.

    But for the one that `multiprocessing` starts beside a spawned process and keeps: other tests may have had one.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # gone meanwhile
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                is_kept = b"multiprocessing.resource_tracker" in (entry / "cmdline").read_bytes()
                if int(fields[1]) == (parent or os.getpid()) and not is_kept:
                    found.append(int(entry.name))
    return sorted(found)


async def hanging_child() -> int:
    """The child of a one-worker pool that has the job: the older one, once its successor is there as a spare."""
    async with asyncio.timeout(30):
        while True:
            if len(found := children()) > 1:
                return found[0]
            await asyncio.sleep(0.01)
