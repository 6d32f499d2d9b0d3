"""TeamSize: the number of threads for strides (one call of several tokens) of a lone request, or for steps of many
rows, found by measuring during the work.

A measurement at server start competes with the server's other processes for cores: in every other start it found that a
second thread does not pay off. Timing strides later costs nothing. Bits do not depend on the number of threads.

The first strides after a pause, such as a prompt, take up to three times as long, with any number of threads. Such
times are ignored: a number tried then would look bad and, once dropped, would only be tried again after another pause.
"""

from __future__ import annotations

import math

_WORTH = 0.9  # of the best smaller size's time: a draft or other processes may need the cores, too
_AGAIN_S = 0.25  # a size not used for this long is tried again: processes come and go
_PAUSE_S = 0.008  # a longer gap is a pause; between successive strides there are 0.3 to 1.4 ms
_WARM_S = 0.01  # of work after a pause, until a stride's time is stable
_MEMORY = 0.8  # weight of the old time if a size becomes slower; a faster time counts at once


class TeamSize:
    """Not thread-safe; the caller passes all times."""

    def __init__(self, least: int, most: int) -> None:
        """Sizes are `least`, twice as many, ... up to `most`."""
        self._sizes = [least]
        while self._sizes[-1] < most:
            self._sizes.append(min(2 * self._sizes[-1], most))
        self._token_s = dict.fromkeys(self._sizes, math.inf)
        self._used_at = dict.fromkeys(self._sizes, -math.inf)
        self._ended = self._warm_at = -math.inf
        self._is_warm = False

    def choose(self, now: float) -> int:
        """The size for the next stride at time `now` in seconds: the best one, or one not tried for a while."""
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
        """Report that `size` threads took `token_s` seconds per token, until `now`."""
        self._ended = now
        if not self._is_warm:
            return
        before, self._used_at[size] = self._token_s[size], now
        is_first = math.isinf(before)
        self._token_s[size] = token_s if is_first else min(token_s, _MEMORY * before + (1 - _MEMORY) * token_s)
