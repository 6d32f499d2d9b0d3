"""WorkMeter: how busy a worker was since its last heartbeat, and the heartbeat itself."""

from __future__ import annotations

import time

from vidspec_service.engine.channels import Channel
from vidspec_service.engine.messages import Heartbeat

HEARTBEAT_S = 1.0


class WorkMeter:
    """`with meter:` around work; `beat` tells the API once a second."""

    def __init__(self) -> None:
        self._since = self._entered = time.monotonic()
        self._busy_s = 0.0

    def __enter__(self) -> None:
        self._entered = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._busy_s += time.monotonic() - self._entered

    def beat(self, api: Channel, num_running: int, num_waiting: int, cache_tokens: int) -> None:
        """Send a heartbeat if one is due."""
        now = time.monotonic()
        if now - self._since < HEARTBEAT_S:
            return
        api.send(
            Heartbeat(
                num_running=num_running,
                num_waiting=num_waiting,
                cache_tokens=cache_tokens,
                busy_s=self._busy_s,
                elapsed_s=now - self._since,
            )
        )
        self._since, self._busy_s = now, 0.0
