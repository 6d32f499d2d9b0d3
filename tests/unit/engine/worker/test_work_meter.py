"""A worker's heartbeats: once a second, how busy it was, and its forwards since the last one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.unit.engine.worker.test_outbox import Clock, heard
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Heartbeat
from vidspec_service.engine.worker.loop import WorkMeter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("vidspec_service.engine.worker.loop.time", clock)
    return clock


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    with closing(ours), closing(theirs):
        yield ours, theirs


def test_a_heartbeat_counts_work_and_forwards_since_the_one_before(clock: Clock, ends: tuple[Channel, Channel]) -> None:
    meter, began = WorkMeter(), clock.now
    for first in (began, began + 1.5):
        with meter:
            meter.rows(3)
            meter.rows(1)
            clock.now += 0.25
        with meter:
            clock.now += 0.5  # work without a forward
        clock.now += 0.125
        meter.beat(ends[0], 0.5, has_peer=True)
        assert heard(ends[1]) == [], "it is not due"
        clock.now += 0.625
        meter.beat(ends[0], 0.5, has_peer=True)
        assert heard(ends[1]) == [
            Heartbeat(
                cache_usage=0.5,
                busy_s=0.75,
                elapsed_s=1.5,
                until=first + 1.5,
                forwards=((first, first + 0.25, 4),),
                has_peer=True,
            )
        ]


@pytest.mark.usefixtures("clock")
def test_forwards_too_many_for_a_message_are_told_early(ends: tuple[Channel, Channel]) -> None:
    meter, told = WorkMeter(), 0
    for _ in range(5000):
        with meter:
            meter.rows(1)
        meter.beat(ends[0], 0.5, has_peer=False)
        told += sum(len(each.forwards) for each in heard(ends[1]) if isinstance(each, Heartbeat))
    assert told == 5000
