"""What Ctrl-C does to a bench: what was measured so far becomes the report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def until_interrupted(those: Iterable[T]) -> Iterator[T]:
    """`those`, until Ctrl-C: the one at hand is then the last. A second Ctrl-C ends the bench without a report."""
    usual, is_over = signal.getsignal(signal.SIGINT), False

    def end(*_: object) -> None:
        nonlocal is_over
        is_over = True
        signal.signal(signal.SIGINT, usual)
        sys.stderr.write("the report comes after what is being measured now; Ctrl-C again ends without one\n")

    signal.signal(signal.SIGINT, end)
    try:
        for each in those:
            if is_over:
                return
            yield each
    finally:
        signal.signal(signal.SIGINT, usual)
