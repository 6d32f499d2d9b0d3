"""What the workers did and when, from the heartbeats they send: idle shares, forward times, the lanes of a timeline."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from statistics import fmean, median

from vidspec_service.bench.common.report import Row
from vidspec_service.bench.common.samples import Interval, union
from vidspec_service.engine.ipc.messages import Heartbeat

_HEARTBEAT_TIMEOUT_S = 10.0
Span = tuple[float, float, int]  # start, end, rows of the forward in it


class Activity:
    """Collects the heartbeats of one engine. Belongs to one event loop."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = {}
        self._until: dict[str, float] = {}
        self._news = asyncio.Event()

    def take(self, role: str, heartbeat: Heartbeat) -> None:
        """The engine's `on_heartbeat`."""
        self._spans.setdefault(role, []).extend(heartbeat.forwards)
        self._until[role] = heartbeat.until
        self._news.set()

    async def complete(self, until: float, roles: Iterable[str]) -> None:
        """Wait until these workers have told all they did up to `until`; a restarted one may never tell."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEARTBEAT_TIMEOUT_S):
                for role in roles:
                    while self._until.get(role, 0.0) < until:
                        self._news.clear()
                        await self._news.wait()

    def spans(self, role: str) -> list[Span]:
        """Everything told so far, in order."""
        return self._spans.get(role, [])


def idle_ratio(spans: Sequence[Span], windows: Iterable[Interval]) -> float | None:
    """Share of the windows in which the worker did nothing; None without any time."""
    merged = union(windows)
    whole = sum(stop - start for start, stop in merged)
    if whole <= 0:
        return None
    busy = sum(
        min(stop, end) - max(start, begin) for start, stop in merged for begin, end, _ in within(spans, (start, stop))
    )
    return max(0.0, 1.0 - busy / whole)


def forward_facts(spans: Sequence[Span], windows: Iterable[Interval]) -> Row | None:
    """The decoding steps as they ran, beside the other worker and at growing contexts; None if there were none.

    They start within the windows, which the prefill of a first token does not.
    """
    merged = union(windows)
    found = [span for window in merged for span in within(spans, window) if span[0] >= window[0]]
    if not found:
        return None
    return {
        "num_forwards": len(found),
        "median_s": median(end - start for start, end, _ in found),
        "mean_rows": fmean(rows for _, _, rows in found),
    }


def within(spans: Sequence[Span], window: Interval) -> Sequence[Span]:
    """The spans that touch an interval. A worker's spans are in order and never overlap."""
    start, stop = window
    return spans[
        bisect_right(spans, start, key=lambda span: span[1]) : bisect_left(spans, stop, key=lambda span: span[0])
    ]
