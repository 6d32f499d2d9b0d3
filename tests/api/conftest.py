"""The API tests are coroutines on asyncio, run by anyio's pytest plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.api.world import COMPILER


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def grammar_process() -> Iterator[None]:
    """Started by this thread, which stays; shared by all worlds, and idle where no test asks for it."""
    with closing(COMPILER):
        COMPILER.start()
        yield
