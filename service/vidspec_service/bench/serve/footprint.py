"""What a server holds at one moment, as the kernel sees it: memory, processes, descriptors, files of uploads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Resident memory counts what processes share in each of them: for differences, not for sums."""

    resident_bytes: int
    num_processes: int
    num_descriptors: int
    num_files: int


def footprint(pid: int, upload_dir: Path) -> Footprint:
    """Of a process and all below it; the folder is the one its uploads go to."""
    pids = list(tree(pid))
    return Footprint(
        resident_bytes=sum(map(_resident_bytes, pids)),
        num_processes=len(pids),
        num_descriptors=sum(map(_num_descriptors, pids)),
        num_files=sum(path.is_file() for path in upload_dir.rglob("*")),
    )


def tree(root: int) -> Iterator[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # gone meanwhile
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:  # grows while it is walked
        found += children.get(pid, [])
    yield from found


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


def _num_descriptors(pid: int) -> int:
    with suppress(OSError):  # gone, or confined: nobody but root may look
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0
