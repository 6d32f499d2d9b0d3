"""Channel: typed messages over a local socket, never blocking the sender, never unpickling anything.

A sequenced-packet socket keeps message boundaries and delivers a message whole or not at all; file descriptors
(shared memory, other channels) ride along. The kernel's buffer is the queue's bound: a peer that stops reading
makes `send` raise ChannelFull instead of hanging the sender.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Protocol, get_args

import msgspec

from vidspec_service.engine.ipc.messages import Message

_TYPES: tuple[type[Message], ...] = get_args(Message)
_KINDS = {kind: index for index, kind in enumerate(_TYPES)}
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in _TYPES]
_ENCODER = msgspec.msgpack.Encoder()
_MAX_MESSAGE_BYTES = 128 * 1024
_MAX_FDS = 2


class ChannelClosed(Exception):
    """The peer is gone."""


class ChannelFull(Exception):
    """The peer does not read; the message was not sent."""


class Channel:
    """One end of a two-way message channel."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(left), Channel(right)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """An end that came from another process; takes ownership of `fd`."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send at once or raise ChannelFull / ChannelClosed. The kernel duplicates `fds`; ours stay open."""
        data = bytes((_KINDS[type(message)],)) + _ENCODER.encode(message)
        if len(data) > _MAX_MESSAGE_BYTES:
            raise ValueError(f"{type(message).__name__} of {len(data)} bytes does not belong on a channel")
        try:
            socket.send_fds(self._socket, [data], list(fds))
        except BlockingIOError as error:
            raise ChannelFull("the peer does not read its messages") from error
        except OSError as error:
            raise ChannelClosed("the peer is gone") from error

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its file descriptors, or None if there is none now; raises ChannelClosed."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, _MAX_FDS)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed("the peer is gone") from error
        if not data:
            raise ChannelClosed("the peer closed the channel")
        return _DECODERS[data[0]].decode(memoryview(data)[1:]), list(fds)

    def close(self) -> None:
        self._socket.close()


class Readable(Protocol):
    """Whatever can be polled."""

    def fileno(self) -> int: ...


def wait_readable(sources: Sequence[Readable], timeout_s: float) -> None:
    """Return as soon as any source has something to read or was closed, or when the time is up."""
    poll = select.poll()
    for source in sources:
        poll.register(source.fileno(), select.POLLIN)
    poll.poll(timeout_s * 1000)
