"""SampleClips: the clips that `vidspec render-clip` writes, for users without a video. Rendered in a child process.

This keeps PyAV out of the API process, and its event loop free: a clip takes a core for a third of a second.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cachetools import LRUCache

from vidspec_service.errors import CapacityError

MAX_SEED = 9999
_MAX_CACHED = 16  # clips of some 20 kB
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class SampleClip:
    """An MP4 file, and the true caption of what it shows."""

    content: bytes
    caption: str


class SampleClips:
    """Renders in one child at a time and keeps the latest clips. For one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sample")
        self._kept: LRUCache[int, SampleClip] = LRUCache(_MAX_CACHED)

    async def clip(self, seed: int) -> SampleClip:
        """The clip of `seed`, from 0 to MAX_SEED; raises CapacityError if the machine is too busy."""
        if seed not in self._kept:
            self._kept[seed] = await asyncio.get_running_loop().run_in_executor(self._thread, _render, seed)
        return self._kept[seed]


def _render(seed: int) -> SampleClip:
    with tempfile.TemporaryDirectory(prefix="vidspec-sample-") as folder:
        path = Path(folder, "clip.mp4")
        command = [sys.executable, "-m", "vidspec_service", "render-clip", "--seed", str(seed), str(path)]
        try:
            child = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
        except subprocess.TimeoutExpired:
            raise CapacityError("The server had no time to render the clip; try again.") from None
        return SampleClip(path.read_bytes(), child.stdout.decode().strip())
