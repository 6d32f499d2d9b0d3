"""Teller: what a worker did for a request, told to the API if the request asks for its timeline.

What happens once is a message of its own. What happens with every forward rides along with the tokens and proposals
that are sent anyway: a message for each would wake the API process as often again.
"""

from __future__ import annotations

import time

from vidspec_models.request import Include
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.types import Activity, Phase
from vidspec_service.engine.worker.input_processor import Input


class Teller:
    """Belongs to one worker's loop."""

    def __init__(self, api: Channel, worker: str) -> None:
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
