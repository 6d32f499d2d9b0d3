"""The signals that ask a server to end.

systemd, timeout(1) and a terminal send them to all processes of a server. Only the API process acts on them, so that
running requests can finish: `forking.tie_to_parent` has the others ignore them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: the terminal was closed


def obeyed_signals() -> list[signal.Signals]:
    """All of them, but not SIGHUP if whoever started us has it ignored, as nohup does."""
    return [each for each in END_SIGNALS if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """Inside, those that are not ignored end the process without a word: nothing is begun yet.

    What Python does by itself is not enough. Linux ends a container's first process by no signal that it does not
    handle; and pydantic, which is being imported, turns a KeyboardInterrupt into an error of its own, or loses it.
    """
    heeded = [each for each in END_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, lambda number, _: os._exit(128 + number)) for each in heeded}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def exiting_at_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end a command as Ctrl-C does, with what it cleans up, unless it has its own handlers.

    What Python does by itself leaves temporary files behind, and does nothing in a container's first process.
    """

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    heeded = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, leave) for each in heeded}
    try:
        yield
    finally:
        for each, handler in before.items():
            if signal.getsignal(each) is leave:
                signal.signal(each, handler)


def interrupt_at_signals() -> None:
    """Until requests are served, treat all of them as Ctrl-C: asyncio cancels its main task then."""
    for number in obeyed_signals():
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored, as in a script's background
