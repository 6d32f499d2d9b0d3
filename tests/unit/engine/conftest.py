"""What the tests of both loops stand on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """Of loops at work. One that sleeps although there is work is not woken by its next heartbeat."""
    monkeypatch.setattr("vidspec_service.engine.worker.loop.HEARTBEAT_S", 60.0)
    with ExitStack() as stack:
        yield stack
