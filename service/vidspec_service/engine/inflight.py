"""Inflight: every request between submission and its end, with what a restarted worker needs to take it up again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from vidspec_service.engine.handover import Handover
from vidspec_service.engine.messages import Accepted, Ended, Generate, Rejected, Tokens
from vidspec_service.engine.types import SpeculationMode
from vidspec_service.errors import EngineError

RequestEvent = Accepted | Rejected | Tokens | Ended
Event = RequestEvent | EngineError
_MOST_LOST_DRAFTS = 2  # that had the request; then it goes on without one, which costs its speed only


@dataclass(slots=True)
class Pending:
    """One request. Its event queue is bounded by its own max_tokens; its payload stays open until its end."""

    message: Generate
    payload: int
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    committed: list[int] = field(default_factory=list)
    is_accepted: bool = False
    num_lost_drafts: int = 0

    @property
    def wants_draft(self) -> bool:
        return self.message.speculation != SpeculationMode.OFF and self.num_lost_drafts < _MOST_LOST_DRAFTS

    def resumed(self) -> Generate:
        """The request as a target must see it that has to go on where another stopped."""
        return replace(self.message, committed=tuple(self.committed))


class Inflight:
    """Belongs to one event loop."""

    def __init__(self, max_running: int) -> None:
        self._pending: dict[str, Pending] = {}
        self._handover = Handover(max_running)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._pending.values()))

    def __len__(self) -> int:
        return len(self._pending)

    @contextmanager
    def registered(self, pending: Pending) -> Iterator[None]:
        """Known from before anything is sent until left. Closes the payload."""
        request_id = pending.message.request_id
        try:
            if request_id in self._pending:
                raise ValueError(f"request id {request_id} is in use")
            self._pending[request_id] = pending
            self._handover.add(request_id)
            yield
        finally:
            os.close(pending.payload)

    def forget(self, request_id: str) -> bool:
        """True if the request had not ended by itself, so that the workers must be told."""
        self._handover.remove(request_id)
        return self._pending.pop(request_id, None) is not None

    def due(self) -> Pending | None:
        """The next request for the target, if there is one that it may have now."""
        request_id = self._handover.due()
        return self._pending[request_id] if request_id is not None else None

    def gave(self, pending: Pending) -> None:
        """The target has it now, until it ends or the target does."""
        self._handover.gave(pending.message.request_id)

    def target_lost(self) -> str | None:
        """What the target had is due again, but for the request to blame, which is returned."""
        return self._handover.died()

    def draft_lost(self) -> None:
        """What has lost too many drafts goes on without one."""
        for pending in self:
            pending.num_lost_drafts += pending.wants_draft

    def route(self, event: RequestEvent) -> bool:
        """Hand an event to its request; False if the request is not there any more or has had it before."""
        pending = self._pending.get(event.request_id)
        if pending is None:
            return False
        if isinstance(event, Accepted):
            if pending.is_accepted:
                return False
            pending.is_accepted = True
        elif isinstance(event, Tokens):
            pending.committed += event.ids
            self._handover.advanced(event.request_id, len(event.ids))
        else:
            self.forget(event.request_id)
        pending.events.put_nowait(event)
        return True

    def fail_all(self, error: EngineError) -> None:
        """No request can go on."""
        for pending in self:
            pending.events.put_nowait(error)
            self.forget(pending.message.request_id)
