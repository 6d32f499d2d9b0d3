"""Resources that our own server holds (memory, processes, file descriptors, files), as the kernel reports them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from vidspec_service.bench.common.report import Row
from vidspec_service.bench.common.server import LocalServer, local_server

_IDLE_TIMEOUT_S, _POLL_S = 30.0, 0.5
_STEADY = ("num_processes", "num_descriptors")


@dataclass(frozen=True, slots=True)
class MonitoredServer:
    """A server, and the folder of its uploads."""

    server: LocalServer
    upload_dir: Path

    def footprint(self) -> Row:
        """Of the server process and its descendants; one that has exited or cannot be inspected counts as 0.

        Memory that processes share is counted in each of them, so only differences of resident memory mean something.
        """
        root = psutil.Process(self.server.process.pid)
        processes = [root, *root.children(recursive=True)]
        return {
            "resident_bytes": _sum(processes, lambda process: process.memory_info().rss),
            "num_processes": len(processes),
            "num_descriptors": _sum(processes, lambda process: process.num_fds()),
            "num_files": sum(path.is_file() for path in self.upload_dir.rglob("*")),  # uploads
        }

    async def idle_footprint(self) -> Row:
        """The footprint once uploads are gone and _STEADY figures no longer change, or after a timeout.

        Raises ConfigError if the server has exited.
        """
        self.server.check()
        found = self.footprint()
        for _ in range(round(_IDLE_TIMEOUT_S / _POLL_S)):
            await asyncio.sleep(_POLL_S)
            self.server.check()
            earlier, found = found, self.footprint()
            if found["num_files"] == 0 and all(earlier[key] == found[key] for key in _STEADY):
                break
        return found


def _sum(processes: Sequence[psutil.Process], figure: Callable[[psutil.Process], int]) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += figure(process)
    return total


@contextmanager
def monitored_server(flags: Sequence[str]) -> Iterator[MonitoredServer]:
    """Run a server with these flags until the block ends; raises ConfigError as `local_server` does."""
    with (
        tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder,
        local_server([*flags, "--upload-dir", folder]) as server,
    ):
        yield MonitoredServer(server, Path(folder))
