"""`vidspec serve` in its own process, with the real decoders and an engine that plays a script.

Run as a module, this file is that process. The question "wait" gets an answer that never ends; every other question is
answered.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from tests.fakes import ANSWER, FakeEngine, FakeLauncher
from vidspec_models.request import GenerationRequest
from vidspec_service.__main__ import main
from vidspec_service.cli import serve
from vidspec_service.end_signals import END_SIGNALS
from vidspec_service.engine.types import Finished, GenerationEvent, TextDelta

ROOT = Path(__file__).parents[2]


class ScriptedEngine(FakeEngine):
    """Takes the place of LocalEngine."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for number in END_SIGNALS:  # an operator is impatient: the cleanup goes on
            signal.raise_signal(number)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Play the script, or wait forever in the middle of it."""
        script = ANSWER
        if request.turns[-1].text == "wait":
            script = (*ANSWER[:2], asyncio.Event())
        for step in script:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, TextDelta | Finished):
                for choice in range(request.n):
                    yield replace(step, choice=choice)
            elif not isinstance(step, Exception):
                yield step


class Served:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line)
            facts: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
            if facts.get("event") == "ready":
                self.url = facts["url"]
                break
        self._drain = threading.Thread(target=self._keep_lines, daemon=True)
        self._drain.start()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 20) -> int:
        """Wait for the exit and return the exit code; afterwards `lines` holds everything the server wrote."""
        code = self.process.wait(timeout_s)
        self._drain.join(timeout_s)
        return code

    def family(self) -> set[int]:
        """The process ids of the server and of all its running descendants."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # the process has ended meanwhile
                continue
            if fields[0] != "Z":
                parents[int(stat.parent.name)] = int(fields[1])
        family = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        return family & set(parents)

    def _keep_lines(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "tests.api.processes", "serve", "--port", "0", "--log-format", "json", *flags]


@contextmanager
def running(command: list[str], env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """Yield a server that is ready; kill it at the end of the block if it still runs."""
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env
    ) as process:
        try:
            server = Served(process)
            assert server.url, server.lines
            yield server
        finally:
            process.kill()
        server.wait()  # the thread that reads stderr must end before the pipe is closed


def served(*flags: str, env: Mapping[str, str] | None = None) -> AbstractContextManager[Served]:
    """`running` with the engine that plays a script."""
    return running(command(*flags), env)


if __name__ == "__main__":
    with patch.multiple(serve, LocalEngine=ScriptedEngine, WorkerLauncher=FakeLauncher):
        sys.exit(main())
