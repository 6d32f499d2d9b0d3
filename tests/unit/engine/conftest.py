"""Fixtures for the tests of both loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Holds running loops. Heartbeats are rare, so that a loop that sleeps although it has work is not woken by one."""
    monkeypatch.setattr("vidspec_service.engine.worker.loop.HEARTBEAT_S", 60.0)
    with ExitStack() as stack:
        yield stack
