"""Finds the decode children of this process, and all that is beneath it, as the kernel sees them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import psutil
import pytest

_KEPT = (b"multiprocessing.resource_tracker", b"engine.fork_server", b"grammars.fork_server")
_FORK_SERVER = b"isolation.fork_server"


def children(parent: int | None = None) -> list[int]:
    """Process ids of what `parent` (this process) has started and what that has forked, zombies included.

    But for those that are kept when other tests have had them: what `multiprocessing` starts beside a spawned process,
    and what workers and the trials of grammars are forked from.
    """
    begun = {pid: command for pid, command in _children_of(parent or os.getpid()).items() if not _is_kept(command)}
    return sorted([*begun, *(forked for pid in begun for forked in _children_of(pid))])


def decoders() -> list[int]:
    """Process ids of the decode children of this process, spares among them, oldest first."""
    servers = [pid for pid, command in _children_of(os.getpid()).items() if _FORK_SERVER in command]
    return sorted(pid for server in servers for pid in _children_of(server))


async def gone(pid: int) -> None:
    """Wait until no process has this id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(psutil.Process(pid).wait, 30)


async def hanging_child() -> int:
    """The child of a one-worker pool that has the job: the older one, once its successor is there as a spare."""
    async with asyncio.timeout(30):
        while True:
            if len(found := decoders()) > 1:
                return found[0]
            await asyncio.sleep(0.01)


def fork_children_with(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on what decode children are forked from runs `code` first."""
    interpreter = folder / "interpreter"
    interpreter.write_text(
        f"#!{sys.executable}\nimport sys\n{code}\nfrom vidspec_service.decoding.isolation import fork_server\n"
        "fork_server.main(*map(int, sys.argv[-2:]))\n"
    )
    interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))


def _children_of(parent: int) -> dict[int, bytes]:
    """Command lines by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # gone meanwhile
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes()
    return found


def _is_kept(command: bytes) -> bool:
    return any(name in command for name in _KEPT)
