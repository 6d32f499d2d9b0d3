"""One engine on the bundled pair, shared by all tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.component.engine.harness import LAUNCHER, EngineHarness
from vidspec_service.engine.config import EngineConfig, WorkerConfig

PAIR = EngineConfig(
    target=WorkerConfig(model="bundled", dtype="float32"), draft=WorkerConfig(model="bundled", dtype="float32")
)


@pytest.fixture(scope="session", autouse=True)
def _launcher() -> Iterator[None]:
    yield
    LAUNCHER.close()


@pytest.fixture(scope="package")
def engine() -> Iterator[EngineHarness]:
    harness = EngineHarness(PAIR)
    yield harness
    harness.close()
