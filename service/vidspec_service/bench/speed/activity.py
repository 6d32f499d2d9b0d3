"""When the workers were busy, from their heartbeats: idle ratios, forward times and the lanes of a timeline."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from statistics import fmean, median

from vidspec_service.bench.common.report import Row
from vidspec_service.bench.common.samples import Interval, merged_intervals
from vidspec_service.engine.ipc.messages import Heartbeat

_HEARTBEAT_TIMEOUT_S = 10.0
ForwardSpan = tuple[float, float, int]  # start and end of a forward pass, and its number of rows


class WorkerActivity:
    """Collects the heartbeats of one engine's workers, whose roles are given. Belongs to one event loop."""

    def __init__(self, roles: Iterable[str]) -> None:
        self.roles = tuple(roles)
        self._spans: dict[str, list[ForwardSpan]] = {}
        self._until: dict[str, float] = {}
        self._news = asyncio.Event()

    def record(self, role: str, heartbeat: Heartbeat) -> None:
        """Record one heartbeat; passed to the engine as `on_heartbeat`."""
        self._spans.setdefault(role, []).extend(heartbeat.forwards)
        self._until[role] = heartbeat.until
        self._news.set()

    async def wait_for(self, until: float) -> None:
        """Wait until all workers have reported their work up to `until`, or a timeout: a restarted one may not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEARTBEAT_TIMEOUT_S):
                for role in self.roles:
                    while self._until.get(role, 0.0) < until:
                        self._news.clear()
                        await self._news.wait()

    def spans(self, role: str) -> list[ForwardSpan]:
        """Everything that this worker has reported so far, in order."""
        return self._spans.get(role, [])


def idle_ratio(spans: Sequence[ForwardSpan], windows: Iterable[Interval]) -> float | None:
    """Share of the windows' time in which the worker did nothing; None if the windows are empty."""
    merged = merged_intervals(windows)
    total = sum(stop - start for start, stop in merged)
    if total <= 0:
        return None
    busy = sum(
        min(stop, end) - max(start, begin) for start, stop in merged for begin, end, _ in within(spans, (start, stop))
    )
    return max(0.0, 1.0 - busy / total)


def steps_within(spans: Sequence[ForwardSpan], windows: Iterable[Interval]) -> list[ForwardSpan]:
    """The spans that start within a window, which leaves out the prefill before each first token."""
    return [span for window in merged_intervals(windows) for span in within(spans, window) if span[0] >= window[0]]


def forward_facts(steps: Sequence[ForwardSpan]) -> Row | None:
    """Decoding steps as they ran, beside the other worker and at growing contexts; None if there were none."""
    if not steps:
        return None
    return {
        "num_forwards": len(steps),
        "median_s": median(end - start for start, end, _ in steps),
        "mean_rows": fmean(rows for _, _, rows in steps),
    }


def within(spans: Sequence[ForwardSpan], window: Interval) -> Sequence[ForwardSpan]:
    """The spans that touch an interval. A worker's spans are in order and never overlap."""
    start, stop = window
    return spans[
        bisect_right(spans, start, key=lambda span: span[1]) : bisect_left(spans, stop, key=lambda span: span[0])
    ]
