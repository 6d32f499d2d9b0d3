"""The far ends of a loop's channels, held by a test; every wait has a timeout."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import TypeVar

from tests.unit.engine.recording_model import RecordingModel
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.prompt import Prompt
from vidspec_models.request import Turn
from vidspec_service.engine.ipc.channel import Channel, ChannelFull, wait_readable
from vidspec_service.engine.ipc.messages import Message, Peer, Verdict

_TIMEOUT_S = 20.0
M = TypeVar("M")


class Far:
    """One far end; `heard` holds all messages received so far."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.heard: list[Message] = []

    def next(self, kind: type[M], when: Callable[[M], bool] = lambda _: True) -> M:
        """Wait for the next message of a kind; messages received before it are in `heard`."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            received = self.channel.receive()
            if received is None:
                assert time.monotonic() < deadline, f"no {kind.__name__} comes"
                wait_readable([self.channel], deadline - time.monotonic())
                continue
            self.heard.append(received[0])
            if isinstance(received[0], kind) and when(received[0]):
                return received[0]

    def poll(self) -> None:
        """Receive all messages that have arrived."""
        while (received := self.channel.receive()) is not None:
            self.heard.append(received[0])

    def of(self, kind: type[M]) -> list[M]:
        """All messages of a kind that were received so far."""
        return [message for message in self.heard if isinstance(message, kind)]

    def wait_closed(self) -> None:
        """Wait until the other side has closed the channel; reads nothing."""
        poll = select.poll()
        poll.register(self.channel.fileno(), 0)
        assert poll.poll(_TIMEOUT_S * 1000), "the other side still holds the channel"

    def close(self) -> None:
        self.channel.close()


def connect_peer(api: Channel, *, is_full: bool = False, **about: bool) -> Far:
    """Send a worker one end of a new channel and return the other; if `is_full`, the worker cannot send on its end."""
    near, far = Channel.pair()
    try:
        while is_full:
            near.send(Verdict(request_id="nobody", start=0, ids=tuple(range(1000)), max_lead=0))
    except ChannelFull:
        pass
    api.send(Peer(**about), (near.fileno(),))
    near.close()
    return Far(far)


def prompt_of(name: str) -> Prompt:
    """The prompt that the model makes of a request of that name."""
    return RecordingModel().prepare([Turn(role="user", parts=(name,))], [], EncoderCache(0))
