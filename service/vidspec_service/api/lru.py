"""Lru: values that cost bytes, kept until they are old, dropped, or the least recently used beyond the budget. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Entry(Generic[V]):
    """One kept value; `expires_at` is a time of the clock that the Lru was given."""

    value: V
    num_bytes: int
    expires_at: float


class Lru(Generic[K, V]):
    """At most `max_bytes` of values, each gone `ttl_s` after its last use; `on_drop` hears of every one that goes.

    A use renews a value's time, so the order of use is the order of expiry, and both are looked for at the front.
    """

    def __init__(
        self, max_bytes: int, ttl_s: float, now: Callable[[], float], on_drop: Callable[[V], None] | None = None
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._now = now
        self._on_drop = on_drop
        self._entries: OrderedDict[K, Entry[V]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The value, whose time begins anew; None if it is not (or no longer) here."""
        entry = self.peek(key)
        if entry is None:
            return None
        self._entries[key] = Entry(entry.value, entry.num_bytes, self._now() + self._ttl_s)
        self._entries.move_to_end(key)
        return entry.value

    def peek(self, key: K) -> Entry[V] | None:
        """The entry as it is: looking is no use of it."""
        self.expire()
        return self._entries.get(key)

    def put(self, key: K, value: V, num_bytes: int) -> bool:
        """Keep `value` in place of what `key` had; False, and nothing is changed, if it can never fit."""
        if num_bytes > self._max_bytes:
            return False
        self.drop(key)
        while self.num_bytes + num_bytes > self._max_bytes:
            self.drop(next(iter(self._entries)))
        self._entries[key] = Entry(value, num_bytes, self._now() + self._ttl_s)
        self.num_bytes += num_bytes
        return True

    def drop(self, key: K) -> bool:
        """Let go of a value; whether there was one."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        if self._on_drop is not None:
            self._on_drop(entry.value)
        return True

    def expire(self) -> None:
        """Let go of everything whose time is over."""
        now = self._now()
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.expires_at > now:
                return
            self.drop(key)

    def items(self) -> list[tuple[K, Entry[V]]]:
        """Everything that is here, least recently used first."""
        self.expire()
        return list(self._entries.items())

    def clear(self) -> None:
        """Let go of everything."""
        for key in list(self._entries):
            self.drop(key)
