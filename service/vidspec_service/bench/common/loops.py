"""The loops of a bench: until Ctrl-C, after which what was measured becomes the report; and in rotating order."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
C = TypeVar("C")


def until_interrupted(items: Iterable[T]) -> Iterator[T]:
    """The items until Ctrl-C: the current one is then the last. A second Ctrl-C ends the bench without a report."""
    previous, is_over = signal.getsignal(signal.SIGINT), False

    def end(*_: object) -> None:
        nonlocal is_over
        is_over = True
        signal.signal(signal.SIGINT, previous)
        sys.stderr.write("the report comes after what is being measured now; Ctrl-C again ends without one\n")

    signal.signal(signal.SIGINT, end)
    try:
        for each in items:
            if is_over:
                return
            yield each
    finally:
        signal.signal(signal.SIGINT, previous)


def rounds(items: Iterable[T], cases: Sequence[C]) -> Iterator[tuple[T, C]]:
    """Each item with every case before the next item, until Ctrl-C; each round starts with another case."""
    for number, item in enumerate(until_interrupted(items)):
        start = number % len(cases)
        for case in (*cases[start:], *cases[:start]):
            yield item, case
