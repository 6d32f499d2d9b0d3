"""What is kept under a budget of bytes and of time, against a model that forgets nothing by itself."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vidspec_service.api.lru import Lru

pytestmark = pytest.mark.unit

BUDGET, TTL = 100, 10.0
KEYS = st.sampled_from("abcdef")


class LruMachine(RuleBasedStateMachine):
    """The model: (key, value, bytes, expiry) in order of use; everything that left it must have been heard of."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.dropped: list[int] = []
        self.model: list[tuple[str, int, int, float]] = []
        self.expected_drops: list[int] = []
        self.next_value = 0
        self.lru: Lru[str, int] = Lru(BUDGET, TTL, lambda: self.now, self.dropped.append)

    def forget(self, is_gone: object) -> None:
        self.expected_drops += [entry[1] for entry in self.model if is_gone(entry)]  # type: ignore[operator]
        self.model = [entry for entry in self.model if not is_gone(entry)]  # type: ignore[operator]

    def age(self) -> None:
        self.forget(lambda entry: entry[3] <= self.now)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS, num_bytes=st.integers(0, 130))
    def put(self, key: str, num_bytes: int) -> None:
        self.next_value += 1
        value = self.next_value
        assert self.lru.put(key, value, num_bytes) == (num_bytes <= BUDGET)
        if num_bytes > BUDGET:
            return
        self.forget(lambda entry: entry[0] == key)
        while sum(entry[2] for entry in self.model) + num_bytes > BUDGET:
            oldest = self.model[0][0]
            self.forget(lambda entry, oldest=oldest: entry[0] == oldest)
        self.model.append((key, value, num_bytes, self.now + TTL))

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        found = self.lru.get(key)
        self.age()
        mine = [entry for entry in self.model if entry[0] == key]
        assert found == (mine[0][1] if mine else None)
        if mine:
            self.model = [entry for entry in self.model if entry[0] != key]
            self.model.append((*mine[0][:3], self.now + TTL))

    @rule(key=KEYS)
    def drop(self, key: str) -> None:
        assert self.lru.drop(key) == any(entry[0] == key for entry in self.model)
        self.forget(lambda entry: entry[0] == key)

    @rule()
    def clear(self) -> None:
        self.lru.clear()
        self.forget(lambda entry: True)

    @rule(key=KEYS)
    def look(self, key: str) -> None:
        self.age()
        entry = self.lru.peek(key)
        mine = [entry for entry in self.model if entry[0] == key]
        assert (entry and (entry.value, entry.num_bytes, entry.expires_at)) == (mine[0][1:] if mine else None)

    @invariant()
    def is_as_the_model(self) -> None:
        self.age()
        assert [(key, entry.value) for key, entry in self.lru.items()] == [entry[:2] for entry in self.model]
        assert self.lru.num_bytes == sum(entry[2] for entry in self.model) <= BUDGET
        assert len(self.lru) == len(self.model)
        assert sorted(self.dropped) == sorted(self.expected_drops)


TestLru = LruMachine.TestCase


def test_looking_does_not_keep_a_value_alive_and_using_it_does() -> None:
    now = 0.0
    lru: Lru[str, str] = Lru(10, 5, lambda: now)
    lru.put("looked at", "x", 1)
    lru.put("used", "y", 1)
    now = 4.0
    assert lru.peek("looked at") is not None
    assert lru.get("used") == "y"
    now = 6.0
    assert [key for key, _ in lru.items()] == ["used"]
