"""Finds the decode children of this process, and all its other descendants, in the kernel's process list."""

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
    """Ids of the children of `parent` (default: this process) and of their children, zombies included.

    Leaves out processes that other tests may have started and that stay: the helper that `multiprocessing` starts for a
    spawned process, and the fork servers of workers and of grammar trials.
    """
    begun = {pid: command for pid, command in _children_of(parent or os.getpid()).items() if not _is_kept(command)}
    return sorted([*begun, *(forked for pid in begun for forked in _children_of(pid))])


def decoders() -> list[int]:
    """Process ids of the decode children of this process, spares among them, oldest first."""
    servers = [pid for pid, command in _children_of(os.getpid()).items() if _FORK_SERVER in command]
    return [pid for server in servers for pid in _children_of(server)]


async def gone(pid: int) -> None:
    """Wait until no process has this id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(psutil.Process(pid).wait, 30)


async def hanging_child() -> int:
    """The busy child of a one-worker pool: the older one, once its successor has started as a spare."""
    async with asyncio.timeout(30):
        while True:
            if len(found := decoders()) > 1:
                return found[0]
            await asyncio.sleep(0.01)


def fork_children_with(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, the fork server of decode children runs `code` first."""
    interpreter = folder / "interpreter"
    interpreter.write_text(
        f"#!{sys.executable}\nimport sys\n{code}\nfrom vidspec_service.decoding.isolation import fork_server\n"
        "fork_server.main(*map(int, sys.argv[-2:]))\n"
    )
    interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))


def _children_of(parent: int) -> dict[int, bytes]:
    """Command lines by process id, the oldest process first: ids begin anew, in containers often after 32768."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    found[int(fields[19]), int(entry.name)] = (entry / "cmdline").read_bytes()
    return {pid: command for (_, pid), command in sorted(found.items())}


def _is_kept(command: bytes) -> bool:
    return any(name in command for name in _KEPT)
