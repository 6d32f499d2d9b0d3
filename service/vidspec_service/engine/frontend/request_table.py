"""RequestTable: every request from submission to its end, and when each of them is sent to a target. Pure.

When a target dies, its requests are sent to the next target, so no answer is lost. But one of them may have killed the
target and would kill the next one too. So these requests are tried one at a time, oldest first: the next one is sent
when the one before it has ended, or has passed every position where the dead target may have been. Text depends on the
request alone, so a request that killed a target kills the next one at the same position, when every other request there
is already cleared: only the request on trial is refused. A cause that does not act every time (memory, a race) can
pass a trial. So a request present at three deaths stays on trial to its end, which means that it runs alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_service.engine.ipc.messages import MAX_HELD_TOKENS, Ended, Generate, Rejected, RequestMessage, Tokens
from vidspec_service.engine.ipc.payload import Payload, close_fds, write_ids
from vidspec_service.engine.types import PromptReady
from vidspec_service.errors import EngineError

# Tokens: a dead target may have held back MAX_HELD_TOKENS, and its last forward may have made at most 33 more.
CLEARED_AFTER = MAX_HELD_TOKENS + 33
_MAX_LOST_TARGETS = 2  # that had the request; after more, it stays on trial to its end
_MAX_LOST_DRAFTS = 2  # that had the request; then it goes on without a draft, which costs only speed

QueueItem = RequestMessage | EngineError


@dataclass(slots=True)
class RequestState:
    """One answer. Its message queue is bounded by its own max_tokens; its payload stays open until its end."""

    request: GenerationRequest  # without its frames, which lie in the payload
    payload: Payload  # shared by all answers to one prompt, like their queue
    choice: int = 0  # index of this answer among them
    messages: asyncio.Queue[QueueItem] = field(default_factory=asyncio.Queue)
    committed: list[int] = field(default_factory=list)
    is_running: bool = False
    has_draft: bool = False  # the draft has been sent this request and has not been lost since
    num_lost_drafts: int = 0
    num_lost_targets: int = 0
    num_new: int = 0  # tokens since it was sent to the present target

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def wants_draft(self) -> bool:
        return self.request.speculation is not SpeculationMode.OFF and self.num_lost_drafts < _MAX_LOST_DRAFTS

    def send_via(self, send: Callable[[Generate, Payload], bool]) -> bool:
        """Send the request and its committed tokens, from which a new worker goes on; returns what `send` returns."""
        message = Generate(request_id=self.request_id, choice=self.choice, has_committed=bool(self.committed))
        ids = [write_ids(self.committed)] if self.committed else []
        try:
            return send(message, (*self.payload, *ids))
        finally:
            close_fds(ids)


class RequestTable:
    """Belongs to one event loop. Requests are sent to the target in the order of their submission."""

    def __init__(self, max_running_requests: int) -> None:
        self._max_running = max_running_requests
        self._sent: dict[str, RequestState] = {}
        self._waiting: dict[str, RequestState] = {}
        self._on_trial: str | None = None

    def __iter__(self) -> Iterator[RequestState]:
        return iter([*self._sent.values(), *self._waiting.values()])

    def __len__(self) -> int:
        return len(self._sent) + len(self._waiting)

    @contextmanager
    def registered(self, *states: RequestState) -> Iterator[None]:
        """Add the answers to one prompt, before any of them is sent. Closes their payload in the end."""
        try:
            for state in states:
                self.add(state)
            yield
        finally:
            close_fds(states[0].payload)

    def add(self, state: RequestState) -> None:
        """Add a request; it is sent after those that wait already."""
        self._waiting[state.request_id] = state

    def remove(self, request_id: str) -> bool:
        """Remove a request that has ended in any way; True if it was still here, so that the workers must be told."""
        if self._on_trial == request_id:
            self._on_trial = None
        return (self._sent.pop(request_id, None) or self._waiting.pop(request_id, None)) is not None

    def next_due(self) -> RequestState | None:
        """The request to send to the target next, if its time has come."""
        if self._on_trial is not None or not self._waiting:
            return None
        state = next(iter(self._waiting.values()))
        # A request on trial must be computed at once, not wait at the target for a place.
        has_place = not state.num_lost_targets or len(self._sent) < self._max_running
        return state if has_place else None

    def mark_sent(self, state: RequestState) -> None:
        """The target has it now, until it ends or the target does."""
        self._sent[state.request_id] = self._waiting.pop(state.request_id)
        if state.num_lost_targets:
            self._on_trial = state.request_id

    def target_lost(self) -> str | None:
        """All sent requests wait again; returns the id of the one to blame, if any, which the caller must reject."""
        culprit, self._on_trial = self._on_trial, None
        for state in self._sent.values():
            state.num_lost_targets += 1
            state.num_new = 0
        self._waiting = {**self._sent, **self._waiting}
        self._sent = {}
        return culprit

    def draft_lost(self) -> None:
        """Count a lost draft for each request that it had; one that has lost too many goes on without."""
        for state in self:
            state.num_lost_drafts += state.has_draft
            state.has_draft = False

    def route(self, message: RequestMessage) -> bool:
        """Put a message into its request's queue; False if the request has ended, and for a second PromptReady."""
        state = self._sent.get(message.request_id) or self._waiting.get(message.request_id)
        if state is None:
            return False
        if isinstance(message, PromptReady):
            if state.is_running:
                return False
            state.is_running = True
        elif isinstance(message, Tokens):
            state.committed += message.ids
            state.num_new += len(message.ids)
            is_cleared = state.num_new >= CLEARED_AFTER and state.num_lost_targets <= _MAX_LOST_TARGETS
            if self._on_trial == state.request_id and is_cleared:
                self._on_trial = None
        elif isinstance(message, Rejected | Ended):
            self.remove(message.request_id)
        state.messages.put_nowait(message)
        return True

    def fail_all(self, error: EngineError) -> None:
        """End all requests with this error."""
        for state in self:
            state.messages.put_nowait(error)
            self.remove(state.request_id)
