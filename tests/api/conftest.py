"""The API tests are coroutines on asyncio, run by anyio's pytest plugin."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.api.world import FORKS
from vidspec_service.api.limits.admission import FairQueue
from vidspec_service.telemetry import configure_logging


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def in_line(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The callers that wait for slots of a decoder or of the engine; one that gets a free slot is removed at once."""
    waiting: list[str] = []
    acquire = FairQueue.acquire

    async def counted(queue: FairQueue, caller: str, num: int = 1) -> None:
        waiting.append(caller)
        try:
            await acquire(queue, caller, num)
        finally:
            waiting.remove(caller)

    monkeypatch.setattr(FairQueue, "acquire", counted)
    return waiting


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The log lines, as JSON."""
    level = logging.root.level
    monkeypatch.setattr(logging.root, "handlers", [])
    stream = io.StringIO()
    configure_logging("debug", "json", stream)
    yield stream
    logging.root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def grammar_process() -> Iterator[None]:
    """Start the compiler from a thread that outlives it; all worlds share it, and it idles if no test uses it."""
    with closing(FORKS):
        FORKS.start()
        yield
