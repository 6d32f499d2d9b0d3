"""Outbox: sends a worker's messages to the API in order, tokens with a small delay.

Sending is cheap, but waking the process that waits takes some 90 microseconds on a virtual machine: a twelfth of a
small model's step, and nobody reads a stream a thousand times a second. vLLM and SGLang count tokens for this
(`stream_interval`); here it is a time, so that a slower model's tokens are still sent at once.
"""

from __future__ import annotations

import time

from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import MAX_HELD_TOKENS, Message, Tokens


class Outbox:
    """Sends messages at once, except tokens, of which at most MAX_HELD_TOKENS wait for a flush.

    So few, because the API must know about how far a target had come when a request killed it.
    """

    def __init__(self, channel: Channel, interval_s: float) -> None:
        self._channel = channel
        self._interval_s = interval_s
        self._flushed_at = 0.0
        self._held: list[Tokens] = []
        self._num_held = 0  # tokens

    def send(self, message: Message) -> None:
        """Send or hold back a message. Raises what `Channel.send` raises, also for messages held back before."""
        if isinstance(message, Tokens) and self._num_held + len(message.ids) <= MAX_HELD_TOKENS:
            self._held.append(message)
            self._num_held += len(message.ids)
            return
        self.flush()
        self._channel.send(message)

    def flush(self) -> None:
        """Send what is held back; called before work that takes time."""
        if self._held:
            held, self._held, self._num_held = self._held, [], 0
            for message in held:
                self._channel.send(message)

    def flush_if_due(self) -> None:
        """Flush if `interval_s` has passed since this last did; called when all of a forward's tokens are here.

        Other flushes do not count: if they did, a slow model's tokens would wait for the next forward when another
        answer ends.
        """
        if self._held and (now := time.monotonic()) - self._flushed_at >= self._interval_s:
            self._flushed_at = now
            self.flush()
