"""The loops of a bench: until Ctrl-C, after which what was measured becomes the report; and in rotating order."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


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


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items, rotated left by `by`: each round of a bench starts with another one, so that none is always first."""
    start = by % len(items)
    return [*items[start:], *items[:start]]
