"""Outbox: a worker's messages to the API, in order, tokens a little later than the others.

To send is cheap, but to wake the process that waits for it takes some 90 microseconds on a virtual machine: a twelfth
of a small model's step, and nobody reads a stream a thousand times a second. vLLM and SGLang count tokens for that
(`stream_interval`); here it is a time, so that a slower model's tokens are told at once, as ever.
"""

from __future__ import annotations

import time

from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import MOST_HELD_TOKENS, Message, Tokens


class Outbox:
    """Sends what it is given at once, but for tokens, which wait for a flush: few, and not for long.

    They are few because the API must know, of a request that has killed its target, about how far that came.
    """

    def __init__(self, channel: Channel, interval_s: float) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._flushed_at = 0.0
        self._held: list[Tokens] = []
        self._num_held = 0  # tokens

    def send(self, message: Message) -> None:
        """Raises what `Channel.send` does, also for a message that was held back."""
        if isinstance(message, Tokens) and self._num_held + len(message.ids) <= MOST_HELD_TOKENS:
            self._held.append(message)
            self._num_held += len(message.ids)
            return
        self.flush()
        self._channel.send(message)

    def flush(self) -> None:
        """Send what is held back: before whatever takes time."""
        if self._held:
            held, self._held, self._num_held = self._held, [], 0
            for message in held:
                self._channel.send(message)

    def flush_if_due(self) -> None:
        """The same `interval_s` after the last time, when all of a forward's tokens are here.

        What else was sent meanwhile does not count: where another answer ends, a slow model's tokens would wait for the
        next forward.
        """
        if self._held and (now := time.monotonic()) - self._flushed_at >= self._interval_s:
            self._flushed_at = now
            self.flush()
