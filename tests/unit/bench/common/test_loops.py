"""Ctrl-C in a loop of a bench."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from vidspec_service.bench.common.loops import rounds, until_interrupted


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """As a command has it that Ctrl-C is to end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_after_ctrl_c_the_one_at_hand_is_the_last() -> None:
    done = []
    for each in until_interrupted(range(5)):
        if each == 2:
            signal.raise_signal(signal.SIGINT)
        done.append(each)
    assert done == [0, 1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_the_command() -> None:
    loop = until_interrupted(range(5))
    next(loop)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_after_a_loop_ctrl_c_ends_the_command() -> None:
    assert list(until_interrupted(range(5))) == [*range(5)]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_cases_take_turns_at_being_first() -> None:
    asked = list(rounds(range(4), "abc"))
    assert [case for _, case in asked[::3]] == ["a", "b", "c", "a"]
    assert sorted(asked) == [(item, case) for item in range(4) for case in "abc"]
    assert [item for item, _ in asked] == sorted(item for item, _ in asked)
