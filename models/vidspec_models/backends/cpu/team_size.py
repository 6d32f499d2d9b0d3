"""TeamSize: how many threads strides of a lone request take, or steps of many rows: as many as pay, found out while
they work.

Who measures while a server starts shares the cores with its other processes, and finds in every other start that a
second thread does not pay. What a stride takes later is known for nothing. Bits do not depend on the size.

The first strides after a pause, a prompt for instance, take up to three times as long, whatever their size. One that is
tried then looks bad, and as it is left it would never be tried at another time.
"""

from __future__ import annotations

import math

_WORTH = 0.9  # of the time with half as many: a draft or other processes may want the cores, too
_AGAIN_S = 0.25  # after that another size is tried once more: processes come and go
_PAUSE_S = 0.008  # between strides that follow one another lie 0.3 to 1.4 ms
_WARM_S = 0.01  # of work, until strides take what they take from then on
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
        self._ended = self._warm_at = -math.inf
        self._is_warm = False

    def choose(self, now: float) -> int:
        """For the next tokens, at a time in seconds: the one that pays, or one not tried for a while."""
        if now - self._ended > _PAUSE_S:
            self._warm_at = now + _WARM_S
        self._is_warm = now >= self._warm_at
        best = self._sizes[0]
        for size in self._sizes:
            if self._is_warm and now - self._used_at[size] > _AGAIN_S:
                return size
            if self._token_s[size] < _WORTH * self._token_s[best]:
                best = size
        return best

    def observe(self, size: int, token_s: float, now: float) -> None:
        """That many threads took so long for a token."""
        self._ended = now
        if not self._is_warm:
            return
        before, self._used_at[size] = self._token_s[size], now
        is_first = math.isinf(before)
        self._token_s[size] = token_s if is_first else min(token_s, _MEMORY * before + (1 - _MEMORY) * token_s)
