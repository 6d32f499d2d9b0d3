"""Time that the engine loses to a restart is added to a request's deadline, up to a limit; who leaves ends it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from vidspec_service.api.limits import deadline as module
from vidspec_service.api.limits.deadline import Deadline
from vidspec_service.errors import DeadlineExceeded

T = TypeVar("T")


class Clock(selectors.DefaultSelector):
    """Instead of waiting it moves on, so that the times are exact, however busy the machine."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time begins at 0 and is told by a `Clock`."""

    def __init__(self) -> None:
        self._clock = Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(scenario: Coroutine[None, None, T]) -> T:
    with asyncio.Runner(loop_factory=ClockedLoop) as runner:
        return runner.run(scenario)


class Engine:
    """An engine whose target is lost at `lost_at` and is back `outage_s` later; requests come at 0."""

    def __init__(self, lost_at: float, outage_s: float) -> None:
        self._lost_at = lost_at
        self._outage_s = outage_s
        self.num_asked = 0

    def outage_s(self) -> float:
        self.num_asked += 1
        return min(max(asyncio.get_running_loop().time() - self._lost_at, 0.0), self._outage_s)


def ended_after(timeout_s: float, engine: Engine) -> float:
    async def scenario() -> float:
        deadline = Deadline(timeout_s, asyncio.Event(), None, engine.outage_s)
        with pytest.raises(DeadlineExceeded):
            await deadline.run(asyncio.sleep(10))
        return asyncio.get_running_loop().time()

    return run(scenario())


def test_an_outage_is_added() -> None:
    assert ended_after(0.15, Engine(0.05, 0.2)) == pytest.approx(0.35, abs=module._MIN_WAIT_S)


def test_an_outage_that_does_not_end_is_added_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EXTENSION_S", 0.2)
    assert ended_after(0.1, Engine(0.05, 100.0)) == pytest.approx(0.3, abs=module._MIN_WAIT_S)


def test_one_from_before_the_request_is_not() -> None:
    assert ended_after(0.1, Engine(-5.0, 2.0)) == pytest.approx(0.1)


def test_an_outage_at_the_last_moment_does_not_keep_the_event_loop_busy() -> None:
    engine = Engine(0.0999, 1.0)
    assert ended_after(0.1, engine) == pytest.approx(1.1, abs=module._MIN_WAIT_S)
    assert engine.num_asked < 100


def test_work_that_ends_in_the_added_time_is_returned() -> None:
    async def scenario() -> str:
        engine = Engine(0.0, 0.3)
        return await Deadline(0.1, asyncio.Event(), None, engine.outage_s).run(asyncio.sleep(0.25, "done"))

    assert run(scenario()) == "done"


def test_work_that_is_cut_has_cleaned_up_before_the_reason_is_raised() -> None:
    async def scenario() -> bool:
        is_clean = False

        async def work() -> None:
            nonlocal is_clean
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.5)
                is_clean = True

        with pytest.raises(DeadlineExceeded):
            await Deadline(0.1, asyncio.Event()).run(work())
        return is_clean

    assert run(scenario())


def test_only_a_disconnect_says_that_the_client_has_left() -> None:
    async def scenario(*kinds: str) -> str:
        messages = asyncio.Queue[Message]()
        for kind in kinds:
            messages.put_nowait({"type": kind})
        return await Deadline(1.0, asyncio.Event(), messages.get).run(asyncio.sleep(0.5, "done"))

    assert run(scenario("http.request")) == "done"
    with pytest.raises(ClientDisconnect):
        run(scenario("http.request", "http.disconnect"))
