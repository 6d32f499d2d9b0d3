"""Fixtures for unit tests of both packages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


@pytest.fixture
def locked_below(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Call it with a folder whose content then belongs to another user."""

    def lock(folder: Path) -> None:
        stat = os.stat

        def as_another_user(path: str | Path, **how: bool) -> os.stat_result:
            if folder in Path(path).parents:
                raise PermissionError(13, "Permission denied", str(path))
            return stat(path, **how)

        monkeypatch.setattr(os, "stat", as_another_user)

    return lock
