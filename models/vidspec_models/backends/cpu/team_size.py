"""TeamSize: how many threads a request that is alone is decoded with: as many as pay, found out while they work.

Who measures while a server starts shares the cores with its other processes, and finds in every other start that a
second thread does not pay. What a stride takes later is known for nothing. Bits do not depend on the size.
"""

from __future__ import annotations

import math

_WORTH = 0.9  # of the time with half as many: nothing else of ours is at work, but other processes may be
_AGAIN_S = 0.25  # after that another size is tried once more: processes come and go
_MEMORY = 0.8  # of a size's pace, where it becomes slower; a faster one counts at once


class TeamSize:
    """For one thread; all times are the caller's."""

    def __init__(self, least: int, most: int) -> None:
        """`least`, twice as many, ... up to `most`."""
        self._sizes = [least]
        while self._sizes[-1] < most:
            self._sizes.append(min(2 * self._sizes[-1], most))
        self._token_s = dict.fromkeys(self._sizes, math.inf)
        self._used_at = dict.fromkeys(self._sizes, -math.inf)

    def choose(self, now: float) -> int:
        """For the next tokens, at a time in seconds: the one that pays, or one not tried for a while."""
        best = self._sizes[0]
        for size in self._sizes:
            if now - self._used_at[size] > _AGAIN_S:
                return size
            if self._token_s[size] < _WORTH * self._token_s[best]:
                best = size
        return best

    def observe(self, size: int, token_s: float, now: float) -> None:
        """That many threads took so long for a token."""
        before, self._used_at[size] = self._token_s[size], now
        is_first = math.isinf(before)
        self._token_s[size] = token_s if is_first else min(token_s, _MEMORY * before + (1 - _MEMORY) * token_s)
