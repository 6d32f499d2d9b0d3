"""Outbox: a worker's messages to the API, in order, tokens a little later than the others.

To send is cheap, but to wake the process that waits for it takes some 90 microseconds on a virtual machine: a twelfth
of a small model's step, and nobody reads a stream a thousand times a second. vLLM and SGLang count tokens for that
(`stream_interval`); here it is a time, so that a slower model's tokens are told at once, as ever.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Message, Tokens


class Outbox:
    """Sends what it is given at once, but for tokens that come within `interval_s` of the last time that it sent."""

    def __init__(self, channel: Channel, interval_s: float) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._sent_at = 0.0
        self._held: list[Tokens] = []

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Raises what `Channel.send` does, also for a message that was held back."""
        if isinstance(message, Tokens) and time.monotonic() - self._sent_at < self._interval_s:
            self._held.append(message)
            return
        self.flush()
        self._channel.send(message, fds)
        self._sent_at = time.monotonic()

    def flush(self) -> None:
        """Send what was held back: whoever is about to wait, or to compute for long, calls this."""
        if self._held:
            held, self._held = self._held, []
            for message in held:
                self._channel.send(message)
            self._sent_at = time.monotonic()
