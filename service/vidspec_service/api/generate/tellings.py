"""Tellings: what is known of how an answer came about and has not been told yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vidspec_models.request import Include
from vidspec_service.api.schemas.tellings import view_of
from vidspec_service.engine.types import Activity, DraftView, Telling

_MOST_SPANS = 10_000  # told at once


class Tellings:
    """Of one request; empty for one that asks for nothing."""

    def __init__(self, include: frozenset[Include], began: float) -> None:
        """`began` is the request's zero, on the monotonic clock."""
        self._include = include
        self._began = began
        self._view: DraftView | None = None
        self._work: list[Activity] = []

    def add(self, telling: Telling) -> None:
        """The engine has said this."""
        if isinstance(telling, DraftView):
            self._view = telling
        elif len(self._work) < _MOST_SPANS:
            self._work.append(telling)

    def take(self, timestamps_s: Sequence[Sequence[float]]) -> dict[str, Any]:
        """What a `Told` is made of: all that came since the last call. `timestamps_s` are of each video's frames."""
        told: dict[str, Any] = {}
        if self._view is not None:
            told["draft_view"] = view_of(self._view, timestamps_s)
        if Include.TIMELINE in self._include:
            told["timeline"] = [self._span(each) for each in self._work]
        self._view, self._work = None, []
        return told

    def _span(self, work: Activity) -> dict[str, Any]:
        return {
            "worker": work.worker,
            "phase": work.phase,
            "start_s": work.start - self._began,
            "end_s": work.end - self._began,
            "num_tokens": work.num_tokens,
        }
