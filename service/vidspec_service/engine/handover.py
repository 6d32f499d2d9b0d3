"""Handover: which requests a target is given when, and which of them its death is blamed on. Pure.

A dead target costs nobody an answer: what it had is given to the next one. Unless one of the requests is what killed
it and would kill the next one too. So what a dead target had is tried, oldest first: a request is given when the one
before it has ended, or has passed every place where the target may have died with it. Text depends on the request
alone, so what died on its way to a place dies there again, with everything else already beyond suspicion: the request
on trial is refused, nothing else is. What comes and goes (memory, a race) can slip through a trial. So whatever
several targets have died with is on trial to its end, which means that it is alone.
"""

from __future__ import annotations

from dataclasses import dataclass

PAST_SUSPICION = 33  # tokens: no forward verifies more proposals than 32, so none reaches further than that
_MOST_DEATHS = 2  # of targets that had the request; beyond them it is tried to its end


@dataclass(slots=True)
class _Case:
    num_deaths: int = 0
    num_new: int = 0  # tokens since it was given to the present target


class Handover:
    """Knows requests by their id. Whoever was given came before whoever is held."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._given: dict[str, _Case] = {}
        self._held: dict[str, _Case] = {}
        self._trial: str | None = None

    def add(self, request_id: str) -> None:
        """A new request; it is given after those that are held, and at once where none is."""
        self._held[request_id] = _Case()

    def remove(self, request_id: str) -> None:
        """It has ended, whatever the end."""
        self._held.pop(request_id, None)
        self._given.pop(request_id, None)
        if self._trial == request_id:
            self._trial = None

    def due(self) -> str | None:
        """The request to give next, if its time has come."""
        if self._trial is not None or not self._held:
            return None
        request_id, case = next(iter(self._held.items()))
        # On trial is who is worked on, not who waits at the target for a place.
        has_place = not case.num_deaths or len(self._given) < self._max_running
        return request_id if has_place else None

    def gave(self, request_id: str) -> None:
        """The target has it now."""
        case = self._given[request_id] = self._held.pop(request_id)
        if case.num_deaths:
            self._trial = request_id

    def advanced(self, request_id: str, num_tokens: int) -> None:
        """The target has committed more tokens of it."""
        case = self._given.get(request_id)
        if case is None:
            return
        case.num_new += num_tokens
        is_cleared = case.num_new >= PAST_SUSPICION and case.num_deaths <= _MOST_DEATHS
        if self._trial == request_id and is_cleared:
            self._trial = None

    def died(self) -> str | None:
        """The target is gone; everything it had is held again, but for the request to blame, if there is one."""
        culprit, self._trial = self._trial, None
        for case in self._given.values():
            case.num_deaths += 1
            case.num_new = 0
        if culprit is not None:
            del self._given[culprit]
        self._held = {**self._given, **self._held}
        self._given = {}
        return culprit
