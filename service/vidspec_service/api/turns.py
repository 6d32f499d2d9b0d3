"""Turns: how many requests are decoded and generated at a time, and whose is next. Callers are served in rotation."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque


class Turns:
    """At most `limit` turns are taken. Of those who wait, each caller's first is served before anyone's second.

    Waiting has no bound of its own: whoever waits has a place, which `Admission` counts, and a deadline.
    """

    def __init__(self, limit: int) -> None:
        self._num_free = limit
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # in order of their next turn

    @property
    def num_waiting(self) -> int:
        """How many want a turn and have none."""
        return sum(len(queue) for queue in self._waiting.values())

    async def take(self, caller: str) -> None:
        """Wait for a turn; every `take` that returns is followed by one `give_back`."""
        if self._num_free > 0:  # then nobody waits
            self._num_free -= 1
            return
        mine = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(caller, deque())
        queue.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it came, and nobody is left to use it
                self.give_back()
            else:
                self._forget(caller, mine)
            raise

    def give_back(self) -> None:
        """Hand the turn to the next in rotation; it is free if nobody waits."""
        while self._waiting:
            caller, queue = next(iter(self._waiting.items()))
            mine = queue.popleft()
            if not mine.done():  # else it was cancelled a moment ago, and its task has not run since
                mine.set_result(None)
                self._waiting.move_to_end(caller)
            if not queue:
                del self._waiting[caller]
            if not mine.cancelled():
                return
        self._num_free += 1

    def _forget(self, caller: str, mine: asyncio.Future[None]) -> None:
        queue = self._waiting.get(caller, deque())
        if mine in queue:
            queue.remove(mine)
            if not queue:
                del self._waiting[caller]
