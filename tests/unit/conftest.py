"""Fixtures for unit tests of both packages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The native id of another thread, which sleeps."""
    wake = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(threading.get_native_id).result(10)
        threads.submit(wake.wait, 20)
        yield found
        wake.set()
