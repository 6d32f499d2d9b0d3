"""The target's messages to the API: all are sent, in order; tokens are delayed only briefly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import MAX_HELD_TOKENS, Ended, Message, Tokens
from vidspec_service.engine.types import FinishReason
from vidspec_service.engine.worker.loop import Outbox

LONG_S = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    with closing(ours), closing(theirs):
        yield ours, theirs


class Clock:
    """A clock that tests advance."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def heard(channel: Channel) -> list[Message]:
    found = []
    while (received := channel.receive()) is not None:
        found.append(received[0])
    return found


def tokens(number: int) -> Tokens:
    return Tokens(request_id="a", ids=(number,))


def ended() -> Ended:
    return Ended(request_id="a", finish_reason=FinishReason.STOP)


def test_tokens_wait_for_a_flush_which_sends_each_once(ends: tuple[Channel, Channel]) -> None:
    outbox = Outbox(ends[0], LONG_S)
    for number in range(3):
        outbox.send(tokens(number))
    assert heard(ends[1]) == []
    outbox.flush()
    outbox.flush()
    assert heard(ends[1]) == [tokens(0), tokens(1), tokens(2)]


def test_whatever_else_is_told_takes_the_held_tokens_along_before_it(ends: tuple[Channel, Channel]) -> None:
    outbox = Outbox(ends[0], LONG_S)
    for number in range(3):
        outbox.send(tokens(number))
    outbox.send(ended())
    assert heard(ends[1]) == [tokens(0), tokens(1), tokens(2), ended()]


def test_no_more_tokens_are_held_than_a_trial_reckons_with(ends: tuple[Channel, Channel]) -> None:
    outbox = Outbox(ends[0], LONG_S)
    num_sent = 0
    for number in range(200):
        outbox.send(Tokens(request_id="a", ids=(number,) * (number % 7 + 1)))
        num_sent += number % 7 + 1
        num_sent -= sum(len(each.ids) for each in heard(ends[1]) if isinstance(each, Tokens))
        assert num_sent <= MAX_HELD_TOKENS


def test_a_flush_is_due_when_nothing_was_sent_for_the_interval(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("vidspec_service.engine.worker.loop.time", clock)
    outbox = Outbox(ends[0], 0.004)
    outbox.send(tokens(0))
    outbox.flush_if_due()
    assert heard(ends[1]) == [tokens(0)], "the first tokens do not wait"
    outbox.send(tokens(1))
    clock.now += 0.003
    outbox.send(tokens(2))
    outbox.flush_if_due()
    assert heard(ends[1]) == []
    clock.now += 0.002
    outbox.flush_if_due()
    assert heard(ends[1]) == [tokens(1), tokens(2)]


def test_another_answers_end_does_not_keep_tokens_back(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("vidspec_service.engine.worker.loop.time", clock)
    outbox = Outbox(ends[0], 0.004)
    outbox.send(tokens(0))
    outbox.flush_if_due()
    clock.now += 0.03
    outbox.send(ended())
    outbox.send(tokens(1))
    outbox.flush_if_due()
    assert heard(ends[1]) == [tokens(0), ended(), tokens(1)]
