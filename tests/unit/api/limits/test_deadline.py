"""Time that the engine loses to a restart is added to a request's deadline, up to a limit."""

from __future__ import annotations

import asyncio
import time

import pytest

from vidspec_service.api.limits import deadline as module
from vidspec_service.api.limits.deadline import Deadline
from vidspec_service.errors import DeadlineExceeded


class Engine:
    """An engine whose target is lost `lost_at` seconds from now and is back `outage_s` later."""

    def __init__(self, lost_at: float, outage_s: float) -> None:
        self._began = time.monotonic() + lost_at
        self._outage_s = outage_s

    def outage_s(self) -> float:
        return min(max(time.monotonic() - self._began, 0.0), self._outage_s)


def ended_after(timeout_s: float, engine: Engine) -> float:
    async def scenario() -> float:
        began = time.monotonic()
        deadline = Deadline(timeout_s, asyncio.Event(), None, engine.outage_s)
        with pytest.raises(DeadlineExceeded):
            await deadline.run(asyncio.sleep(10))
        return time.monotonic() - began

    return asyncio.run(scenario())


def test_an_outage_is_added() -> None:
    assert 0.35 <= ended_after(0.15, Engine(0.05, 0.2)) < 1.0


def test_an_outage_that_does_not_end_is_added_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EXTENSION_S", 0.2)
    assert 0.3 <= ended_after(0.1, Engine(0.05, 100.0)) < 1.0


def test_one_from_before_the_request_is_not() -> None:
    assert 0.1 <= ended_after(0.1, Engine(-5.0, 2.0)) < 0.25


def test_work_that_ends_in_the_added_time_is_returned() -> None:
    async def scenario() -> str:
        engine = Engine(0.0, 0.3)
        return await Deadline(0.1, asyncio.Event(), None, engine.outage_s).run(asyncio.sleep(0.25, "done"))

    assert asyncio.run(scenario()) == "done"
