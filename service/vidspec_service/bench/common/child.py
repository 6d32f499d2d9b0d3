"""Child: a fresh interpreter that runs one of this package's worker modules and answers over a local socket.

Requests and replies are MessagePack, one packet each, with file descriptors riding along. A reply starts with a byte
that tells a value from the text of an error. The child ends when its socket closes.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from vidspec_models.errors import ModelError
from vidspec_service.errors import ConfigError

T = TypeVar("T")
R = TypeVar("R")

_PACKET_BYTES = 128 * 1024
_VALUE, _ERROR = b"+", b"-"
_GRACE_S = 5.0


def spawn(module: str, *words: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module FD WORDS...`; returns the process and our end of its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", module, str(theirs.fileno()), *words]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return process, ours


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process whose socket is closed; kill it if that takes too long."""
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Child:
    """One question at a time; used as `with Child(module) as child`."""

    def __init__(self, module: str, timeout_s: float) -> None:
        self._module = module
        self._process, self._socket = spawn(module)
        self._socket.settimeout(timeout_s)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The child sees the end of its socket and leaves."""
        self._socket.close()
        end(self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: object, kind: type[T], fds: Sequence[int] = ()) -> T:
        """Send a request and wait for its reply; raises ConfigError with the child's words, or for its death."""
        try:
            socket.send_fds(self._socket, [msgspec.msgpack.encode(request)], list(fds))
            reply = self._socket.recv(_PACKET_BYTES)
        except TimeoutError:
            raise ConfigError(f"{self._module} did not answer within {self._socket.gettimeout():g} s") from None
        except OSError:
            reply = b""
        if not reply:
            raise ConfigError(f"{self._module} ended unexpectedly; its output says why")
        if reply[:1] == _ERROR:
            raise ConfigError(reply[1:].decode())
        return msgspec.msgpack.decode(reply[1:], type=kind)


def serve(fd: int, decoder: msgspec.msgpack.Decoder[R], answer: Callable[[R, list[int]], object]) -> int:
    """In the child: answer requests until the parent closes the socket; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    with socket.socket(fileno=fd) as sock:
        while True:
            data, fds, _, _ = socket.recv_fds(sock, _PACKET_BYTES, 1)
            if not data:
                return 0
            try:
                reply = _VALUE + msgspec.msgpack.encode(answer(decoder.decode(data), list(fds)))
            except ModelError as error:
                reply = _ERROR + str(error).encode()
            sock.sendall(reply)
