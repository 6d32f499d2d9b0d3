"""Inflight: every request between submission and its end, with what a restarted worker needs to take it up again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from vidspec_service.engine.messages import Accepted, Ended, Generate, Rejected, Tokens
from vidspec_service.engine.types import SpeculationMode
from vidspec_service.errors import EngineError

RequestEvent = Accepted | Rejected | Tokens | Ended
Event = RequestEvent | EngineError


@dataclass(slots=True)
class Pending:
    """One request. Its event queue is bounded by its own max_tokens; its payload stays open until its end."""

    message: Generate
    payload: int
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    committed: list[int] = field(default_factory=list)
    is_accepted: bool = False

    @property
    def wants_draft(self) -> bool:
        return self.message.speculation != SpeculationMode.OFF

    def resumed(self) -> Generate:
        """The request as a target must see it that has to go on where another stopped."""
        return replace(self.message, committed=tuple(self.committed))


class Inflight:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}

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
            yield
        finally:
            os.close(pending.payload)

    def forget(self, request_id: str) -> bool:
        """True if the request had not ended by itself, so that the workers must be told."""
        return self._pending.pop(request_id, None) is not None

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
        else:
            del self._pending[event.request_id]
        pending.events.put_nowait(event)
        return True

    def fail_all(self, error: EngineError) -> None:
        """No request can go on."""
        for pending in self:
            pending.events.put_nowait(error)
        self._pending.clear()
