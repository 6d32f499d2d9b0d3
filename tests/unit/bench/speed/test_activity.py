"""Idle shares and forward times from traces, and the wait for complete traces."""

from __future__ import annotations

import asyncio

import pytest

from vidspec_service.bench.speed import activity as module
from vidspec_service.bench.speed.activity import WorkerActivity, forward_facts, idle_ratio, steps_within, within
from vidspec_service.engine.ipc.messages import Heartbeat

SPANS = [(0.0, 1.0, 512), (1.0, 2.0, 1), (3.0, 4.0, 3), (6.0, 7.0, 1)]


def test_idle_is_what_the_work_does_not_cover_of_the_windows() -> None:
    assert idle_ratio(SPANS, [(1.0, 5.0)]) == pytest.approx(0.5)
    assert idle_ratio(SPANS, [(1.5, 2.5), (2.0, 3.5)]) == pytest.approx(0.5)
    assert idle_ratio([], [(0.0, 1.0)]) == 1.0
    assert idle_ratio(SPANS, [(2.0, 2.0)]) is None


def test_forward_facts_leave_out_what_began_before_the_window() -> None:
    facts = forward_facts(steps_within(SPANS, [(0.5, 5.0)]))
    assert facts == {"num_forwards": 2, "median_s": 1.0, "mean_rows": 2.0}
    assert forward_facts(steps_within(SPANS, [(4.0, 5.0)])) is None


def test_spans_within_a_window_may_stick_out_of_it() -> None:
    assert list(within(SPANS, (1.5, 3.5))) == SPANS[1:3]
    assert list(within(SPANS, (4.0, 6.0))) == []


def test_it_waits_for_every_worker_to_have_told_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_TIMEOUT_S", 3600.0)

    async def scenario() -> list[str]:
        activity, events = WorkerActivity(("target", "draft")), list[str]()

        async def wait() -> None:
            await activity.wait_for(5.0)
            events.append("complete")

        waiting = asyncio.create_task(wait())
        for role, until in (("target", 6.0), ("draft", 4.0), ("draft", 5.0)):
            await asyncio.sleep(0)
            events.append(f"{role} {until}")
            forwards = ((until - 1, until, 1),)
            activity.record(role, Heartbeat(cache_usage=0.0, busy_s=0.0, elapsed_s=1.0, until=until, forwards=forwards))
        await asyncio.wait_for(waiting, 20)
        assert activity.spans("draft") == [(3.0, 4.0, 1), (4.0, 5.0, 1)]
        return events

    assert asyncio.run(scenario()) == ["target 6.0", "draft 4.0", "draft 5.0", "complete"]


def test_a_worker_that_never_tells_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEARTBEAT_TIMEOUT_S", 0.01)
    asyncio.run(WorkerActivity(["target"]).wait_for(1.0))
