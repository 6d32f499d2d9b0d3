"""What a worker has done: for the API a heartbeat of how busy it was, for a request that asks, its timeline."""

from __future__ import annotations

import time

from vidspec_models.request import Include
from vidspec_service.engine.ipc.channel import Sender
from vidspec_service.engine.ipc.messages import Heartbeat
from vidspec_service.engine.types import Activity, Phase
from vidspec_service.engine.worker.input_processor import Input

HEARTBEAT_S = 1.0
_MOST_FORWARDS = 1000  # in one message; more make it come early


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
        """A forward over so many rows belongs to the present block."""
        self._num_rows += num_rows

    def beat(self, api: Sender, cache_usage: float, *, has_peer: bool) -> None:
        """Send a heartbeat if one is due."""
        now = time.monotonic()
        if now - self._since < HEARTBEAT_S and len(self._forwards) < _MOST_FORWARDS:
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


class Teller:
    """Tells the API what a worker did for a request, if that asks for its timeline.

    What happens once is a message of its own. What happens with every forward rides along with the tokens and proposals
    that are sent anyway: a message for each would wake the API process as often again.
    """

    def __init__(self, api: Sender, worker: str) -> None:
        self._api = api
        self._worker = worker

    def worked(
        self, request_id: str, include: frozenset[Include], phase: Phase, started: float, num_tokens: int
    ) -> tuple[Activity, ...]:
        """From `started` until now, over `num_tokens` of the request's tokens: to ride along; nothing if not asked."""
        if Include.TIMELINE not in include:
            return ()
        return (self._activity(request_id, phase, started, time.monotonic(), num_tokens),)

    def prefilled(self, request_id: str, include: frozenset[Include], started: float, num_tokens: int) -> None:
        """A chunk of so many rows, from `started` until now."""
        for activity in self.worked(request_id, include, Phase.PREFILL, started, num_tokens):
            self._api.send(activity)

    def prepared(self, item: Input, num_tokens: int) -> None:
        """A prompt of so many tokens."""
        if Include.TIMELINE in item.request.include:
            started = item.arrived + item.queue_s
            self._api.send(
                self._activity(item.request_id, Phase.PREPARE, started, started + item.prepare_s, num_tokens)
            )

    def _activity(self, request_id: str, phase: Phase, start: float, end: float, num_tokens: int) -> Activity:
        return Activity(
            request_id=request_id, worker=self._worker, phase=phase, start=start, end=end, num_tokens=num_tokens
        )
