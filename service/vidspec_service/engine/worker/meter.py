"""WorkMeter: measures how busy a worker is and tells the API in heartbeats."""

from __future__ import annotations

import time

from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Heartbeat

HEARTBEAT_S = 1.0
_MAX_FORWARDS = 1000  # in one heartbeat, which is sent early when it has so many


class WorkMeter:
    """`with meter:` around work, `rows` for a forward within it; `beat` tells the API once a second."""

    def __init__(self) -> None:
        self._since = self._entered = time.monotonic()
        self._busy_s = 0.0
        self._num_rows = 0
        self._forwards: list[tuple[float, float, int]] = []

    def __enter__(self) -> None:
        self._entered = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._busy_s += now - self._entered
        if self._num_rows:
            self._forwards.append((self._entered, now, self._num_rows))
        self._num_rows = 0

    def rows(self, num_rows: int) -> None:
        """Count a forward over `num_rows` in the current `with` block."""
        self._num_rows += num_rows

    def beat(self, api: Channel, cache_usage: float, *, has_peer: bool) -> None:
        """Send a heartbeat if one is due."""
        now = time.monotonic()
        if now - self._since < HEARTBEAT_S and len(self._forwards) < _MAX_FORWARDS:
            return
        api.send(
            Heartbeat(
                cache_usage=cache_usage,
                busy_s=self._busy_s,
                elapsed_s=now - self._since,
                until=now,
                forwards=tuple(self._forwards),
                has_peer=has_peer,
            )
        )
        self._since, self._busy_s = now, 0.0
        self._forwards.clear()
