"""Rules for every test: no VIDSPEC_ variable of the shell reaches it, and its folder decides its marker."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Test files run in parallel: each gets one thread, or their threads wait for one another. Workers of the engine choose
# their own number of threads.
if "PYTEST_XDIST_WORKER" in os.environ:  # noqa: TID251
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # noqa: TID251

# Tests check behaviour, not how fast this machine is at the moment.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_TESTS = Path(__file__).parent
_TIERS = ("unit", "component", "api", "page", "gpu")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("VIDSPEC_")]:  # noqa: TID251
        monkeypatch.delenv(name)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting garbage meanwhile took a quarter of the collection's time, and found none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_not_looked_through_again() -> None:
    """Spare the garbage collector the tests, and the modules that the files before have imported: each look took a
    third of a second, in all a fifteenth of the suite's time.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What is frozen is not freed at exit; Triton's binding would print all of it."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier; skip tests that need CUDA where there is none."""
    for item in items:
        tier = item.path.relative_to(_TESTS).parts[0]
        if tier in _TIERS:
            item.add_marker(tier)
    needing_cuda = [item for item in items if item.get_closest_marker("gpu")]
    if needing_cuda and not _has_cuda():
        for item in needing_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
