"""Picks the chosen frames out of a decoder's output, and finds a stand-in for any that never comes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Frame = TypeVar("Frame")


class FramePicker(Generic[Frame]):
    """Fed with (display index, frame) in display order; gives out each chosen frame once, in order.

    A chosen frame that never comes (damaged, dropped by the decoder) is replaced by a decoded neighbour not
    given out itself: the one before, which a player would go on showing, else the one after.
    """

    def __init__(self, chosen: Iterable[int]) -> None:
        self._wanted = deque(chosen)
        self._previous: tuple[int, Frame] | None = None  # the only frame kept alive
        self._last_given = -1
        self.num_replaced = 0
        self.num_lost = 0

    @property
    def wanted(self) -> tuple[int, ...]:
        """Display indices still to come."""
        return tuple(self._wanted)

    @property
    def next_wanted(self) -> int | None:
        """Display index of the next chosen frame; None when all have been dealt with."""
        return self._wanted[0] if self._wanted else None

    def offer(self, index: int, frame: Frame) -> Iterator[tuple[int, Frame]]:
        """Take one decoded frame; give what it settles."""
        while self._wanted and self._wanted[0] < index:
            yield from self._stand_in(self._wanted.popleft(), index, frame)
        if self._wanted and self._wanted[0] == index:
            del self._wanted[0]
            yield self._give(index, frame)
        self._previous = (index, frame)

    def finish(self) -> Iterator[tuple[int, Frame]]:
        """The decoder is empty; settle what is still wanted."""
        while self._wanted:
            yield from self._stand_in(self._wanted.popleft(), -1, None)

    def forget_previous(self) -> None:
        """Decoding jumps ahead: what was on display here says nothing about what comes next."""
        self._previous = None

    def _stand_in(self, missing: int, index: int, frame: Frame | None) -> Iterator[tuple[int, Frame]]:
        if self._previous is not None and self._previous[0] > self._last_given:
            # One frame off is what a player shows, and no damage where each field of a frame is a packet.
            self.num_replaced += missing - self._previous[0] > 1
            yield self._give(*self._previous)
        elif frame is not None and index > self._last_given and index not in self._wanted:
            self.num_replaced += 1
            yield self._give(index, frame)
        else:
            self.num_lost += 1

    def _give(self, index: int, frame: Frame) -> tuple[int, Frame]:
        self._last_given = index
        return index, frame
