"""Teller: what a worker did for a request, told to the API as it happens, if the request asks for its timeline."""

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
    ) -> None:
        """From `started` until now, over `num_tokens` of the request's tokens."""
        if Include.TIMELINE in include:
            self._send(request_id, phase, started, time.monotonic(), num_tokens)

    def prepared(self, item: Input, num_tokens: int) -> None:
        """A prompt of so many tokens."""
        if Include.TIMELINE in item.request.include:
            started = item.arrived + item.queue_s
            self._send(item.request_id, Phase.PREPARE, started, started + item.prepare_s, num_tokens)

    def _send(self, request_id: str, phase: Phase, start: float, end: float, num_tokens: int) -> None:
        self._api.send(
            Activity(
                request_id=request_id,
                worker=self._worker,
                phase=phase,
                start=start,
                end=end,
                num_tokens=num_tokens,
            )
        )
