"""WorkMeter: how busy a worker was since its last heartbeat, the heartbeat itself and, if asked for, a trace."""

from __future__ import annotations

import time

from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Heartbeat, Trace

HEARTBEAT_S = 1.0
_MOST_SPANS = 1000  # forwards in one message; more make it come early


class WorkMeter:
    """`with meter:` around work, `rows` for a forward within it; `beat` tells the API once a second."""

    def __init__(self, *, is_traced: bool = False) -> None:
        self._since = self._entered = time.monotonic()
        self._busy_s = 0.0
        self._is_traced = is_traced
        self._num_rows = 0
        self._spans: list[tuple[float, float, int]] = []

    def __enter__(self) -> None:
        self._entered = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._busy_s += now - self._entered
        if self._num_rows:
            self._spans.append((self._entered, now, self._num_rows))
        self._num_rows = 0

    def rows(self, num_rows: int) -> None:
        """A forward over so many rows belongs to the present block."""
        self._num_rows += num_rows

    def beat(self, api: Channel, cache_tokens: int) -> None:
        """Send a heartbeat if one is due, with the trace since the last one if that is wanted."""
        now = time.monotonic()
        if now - self._since < HEARTBEAT_S and len(self._spans) < _MOST_SPANS:
            return
        if self._is_traced:
            api.send(Trace(until=now, spans=tuple(self._spans)))
        api.send(
            Heartbeat(
                cache_tokens=cache_tokens,
                busy_s=self._busy_s,
                elapsed_s=now - self._since,
                forward_s=tuple(end - start for start, end, _ in self._spans),
            )
        )
        self._since, self._busy_s = now, 0.0
        self._spans.clear()
