"""A server of our own for the length of a block, ended by SIGTERM; what it is sent, and what it holds."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import struct
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from vidspec_service.bench.common.report import Row
from vidspec_service.errors import ConfigError

ROUTE = "/v1/video-chat"
_EBML = b"\x1aE\xdf\xa3"  # Matroska, WebM
_START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 60.0
_QUIET_TIMEOUT_S, _LOOK_S = 30.0, 0.5
_STEADY = ("num_processes", "num_descriptors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where to ask; whom to watch, if it is ours."""

    url: str
    pid: int
    upload_dir: Path

    def footprint(self) -> Row:
        """Of the process and all below it; one that is gone meanwhile, or confined, counts nothing.

        Resident memory counts what processes share in each of them: for differences, not for sums.
        """
        root = psutil.Process(self.pid)
        processes = [root, *root.children(recursive=True)]
        return {
            "resident_bytes": _sum(processes, lambda process: process.memory_info().rss),
            "num_processes": len(processes),
            "num_descriptors": _sum(processes, lambda process: process.num_fds()),
            "num_files": sum(path.is_file() for path in self.upload_dir.rglob("*")),  # of uploads
        }

    async def quiet_footprint(self) -> Row:
        """Once uploads are gone and nothing changes any more, or after a while as it is."""
        found = self.footprint()
        for _ in range(round(_QUIET_TIMEOUT_S / _LOOK_S)):
            await asyncio.sleep(_LOOK_S)
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


@asynccontextmanager
async def own_server(flags: Sequence[str]) -> AsyncIterator[Server]:
    """Ready when the block begins. ConfigError with its last words if it does not start or does not end in order."""
    with tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder:
        fixed = ["--port", "0", "--log-format", "json", "--no-access-log", "--upload-dir", folder]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "vidspec_service", "serve", *flags, *fixed,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        words = deque[str](maxlen=5)
        try:
            url = await asyncio.wait_for(_ready(process.stderr, words), _START_TIMEOUT_S)
            reading = asyncio.create_task(_read_on(process.stderr, words))  # a full pipe would stop it
            yield Server(url=url, pid=process.pid, upload_dir=Path(folder))
            process.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
            await reading
            if code != 0:
                raise ConfigError(f"the server ended with code {code}: {' '.join(words)}")
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _ready(stream: asyncio.StreamReader, words: deque[str]) -> str:
    async for line in stream:
        words.append(line.decode(errors="replace").strip())
        with suppress(ValueError, TypeError):
            entry = json.loads(line)
            if entry.get("event") == "ready":
                return str(entry["url"])
    raise ConfigError(f"the server did not start: {words[-1] if words else 'without a word'}")


async def _read_on(stream: asyncio.StreamReader, words: deque[str]) -> None:
    async for line in stream:
        words.append(line.decode(errors="replace").strip())


def endless(clips: Sequence[bytes], *, is_repeated: bool) -> Iterator[bytes]:
    """The clips, over and over; unless repeated, each with a number at its end that players skip.

    It stands in a void element or a free box; what is neither Matroska nor MP4 has its end marked before.
    """
    for number, clip in enumerate(itertools.cycle(clips)):
        void, free = struct.pack(">BBQ", 0xEC, 0x88, number), struct.pack(">I4sQ", 16, b"free", number)
        yield clip if is_repeated else clip + (void if clip[:4] == _EBML else free)
