"""Child: an object in a new process of its own, so that its model, threads and memory do not disturb other timings."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Lock, RLock
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from tqdm import tqdm

from vidspec_models.errors import ModelError
from vidspec_service.errors import ConfigError

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

_TIMEOUT_S = 900.0


class Child(Generic[T]):
    """`make(*given)` creates the object in the new process before the constructor returns. Calls wait for their turn.

    The constructor and `call` raise ConfigError: with the message of the child's ModelError, or because the child died
    or did not answer in time.
    """

    def __init__(self, make: Callable[..., T], *given: object) -> None:
        context = get_context("spawn")
        self._name = getattr(make, "func", make).__name__
        self._connection, theirs = context.Pipe()
        self._turn = Lock()
        self._process = context.Process(target=_serve, args=(theirs, make, given), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._reply()
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    def __enter__(self) -> Child[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the child, which has nothing to save: at Ctrl-C it may be in the middle of a long call."""
        self._connection.close()
        self._process.kill()
        self._process.join()

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of the object in the child process and return its result."""
        with self._turn:
            with suppress(OSError):  # if the child is gone, `_reply` raises the error
                self._connection.send((method, args, kwargs))
            found: R = self._reply()
            return found

    def _reply(self) -> Any:
        try:
            if not self._connection.poll(_TIMEOUT_S):
                raise ConfigError(f"{self._name} did not answer within {_TIMEOUT_S:g} s")
            is_value, reply = self._connection.recv()
        except (EOFError, OSError):
            raise ConfigError(f"the process of {self._name} ended unexpectedly; its output says why") from None
        if not is_value:
            raise ConfigError(reply)
        return reply


def call_in_child(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a new process that then exits."""
    with Child(partial(function, *args, **kwargs)) as child:
        return child.call(_itself)


def _itself(made: R) -> R:
    return made


def _serve(connection: Connection, make: Callable[..., object], given: tuple[object, ...]) -> None:
    """Runs in the child: answer calls until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    tqdm.set_lock(RLock())  # its own lock has a semaphore, which a killed process leaves behind with a warning
    with suppress(EOFError, BrokenPipeError):
        try:
            made = make(*given)
            connection.send((True, None))
            while True:
                method, args, kwargs = connection.recv()
                connection.send((True, method(made, *args, **kwargs)))
        except ModelError as error:
            connection.send((False, str(error)))
