"""Channel: typed messages over a local socket, never unpickling anything.

A sequenced-packet socket keeps message boundaries and delivers a message whole or not at all; file descriptors
(shared memory, other channels) ride along. The kernel's buffer is the queue's bound: a peer that stops reading
makes `send` raise ChannelFull instead of hanging the sender, at once unless the sender has a timeout.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import msgspec

from vidspec_service.engine.ipc.messages import Message

if TYPE_CHECKING:
    from _typeshed import HasFileno

_TYPES: tuple[type[Message], ...] = get_args(Message)
_KINDS = {kind: index for index, kind in enumerate(_TYPES)}
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in _TYPES]
_ENCODER = msgspec.msgpack.Encoder()
_MAX_MESSAGE_BYTES = 128 * 1024
MAX_FDS = 16  # in one message

logger = logging.getLogger(__name__)


class ChannelClosed(Exception):
    """The peer is gone."""


class ChannelFull(Exception):
    """The peer does not read; the message was not sent."""


class Channel:
    """One end of a two-way message channel."""

    def __init__(self, sock: socket.socket, send_timeout_s: float = 0.0) -> None:
        """`send` waits at most `send_timeout_s` for a peer that does not read."""
        sock.setblocking(False)
        self._socket = sock
        self._send_timeout_s = send_timeout_s

    @staticmethod
    def pair() -> tuple[Channel, Channel]:
        """Two connected ends."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Channel(left), Channel(right)

    @classmethod
    def from_fd(cls, fd: int, send_timeout_s: float = 0.0) -> Channel:
        """An end that came from another process; takes ownership of `fd`."""
        return cls(socket.socket(fileno=fd), send_timeout_s)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send or raise ChannelFull / ChannelClosed. The kernel duplicates `fds`; ours stay open."""
        data = bytes((_KINDS[type(message)],)) + _ENCODER.encode(message)
        if len(data) > _MAX_MESSAGE_BYTES:
            raise ValueError(f"{type(message).__name__} of {len(data)} bytes is too large for a channel")
        try:
            socket.send_fds(self._socket, [data], list(fds))
        except BlockingIOError as error:
            poll = select.poll()
            poll.register(self, select.POLLOUT)
            if not poll.poll(self._send_timeout_s * 1000):  # until the peer has read most of its messages, or is gone
                raise ChannelFull("the peer does not read its messages") from error
            self.send(message, fds)
        except OSError as error:
            raise ChannelClosed("the peer is gone") from error

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its file descriptors, or None if there is none now.

        Raises ChannelClosed, also if the peer sends what is no message: nothing that it says can be relied on.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, MAX_FDS)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelClosed("the peer is gone") from error
        if not data:
            raise ChannelClosed("the peer closed the channel")
        try:
            return _DECODERS[data[0]].decode(memoryview(data)[1:]), list(fds)
        except (msgspec.MsgspecError, IndexError) as error:
            for fd in fds:
                os.close(fd)
            logger.error("a peer has sent what is no message: %s", error)
            raise ChannelClosed("the peer sends what is no message") from error

    def close(self) -> None:
        self._socket.close()


class PeerLink:
    """One worker's channel to the other worker, while there is one. Losing the other is normal and costs only speed."""

    def __init__(self, peer: str) -> None:
        self.channel: Channel | None = None
        self._peer = peer

    def connect(self, channel: Channel) -> None:
        """Use this channel from now on; the new peer knows nothing of what the last one was told."""
        self.disconnect()
        self.channel = channel

    def disconnect(self) -> None:
        """Go on without a peer."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def fileno(self) -> int:
        return -1 if self.channel is None else self.channel.fileno()

    def receive(self) -> list[tuple[Message, list[int]]]:
        """All messages that have arrived, with their file descriptors."""
        messages = []
        try:
            while self.channel is not None and (received := self.channel.receive()) is not None:
                messages.append(received)
        except ChannelClosed:
            self.disconnect()  # the API sees the end of the other, too, and logs it unless it was asked for
        return messages

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send at once, or drop a peer that does not read. The next heartbeat tells the API, which sends a new Peer."""
        if self.channel is None:
            return
        try:
            self.channel.send(message, fds)
        except ChannelClosed:
            self.disconnect()
        except ChannelFull:
            logger.info("the %s does not read; continuing without it", self._peer)
            self.disconnect()


def wait_readable(sources: Sequence[HasFileno], timeout_s: float) -> None:
    """Return as soon as any source has something to read or was closed, or when the time is up.

    A source with a negative descriptor is skipped.
    """
    poll = select.poll()
    for source in sources:
        if (fd := source.fileno()) >= 0:
            poll.register(fd, select.POLLIN)
    poll.poll(timeout_s * 1000)
