"""Failover of an answer: if its engine is lost, the next one continues after the committed tokens. Knows no Ray.

The text depends on request and seed only, so a caller cannot tell how many engines an answer had. `RequestTable` deals
with the deaths of an engine's own workers; this module deals with engines that die as a whole. An engine that dies with
a request may have died of it: then the same request ends the next engine at the same place.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from vidspec_models.request import GenerationRequest
from vidspec_service.engine.frontend.request_table import CLEARED_AFTER
from vidspec_service.engine.types import Finished, GenerationEvent, PromptReady, TextDelta
from vidspec_service.errors import GenerationFailed

MAX_LOST = 2  # engines in a row, at about the same place of one answer


class EngineLost(Exception):
    """The engine that had the request is gone; `is_planned` if the cluster or its operator ended it."""

    def __init__(self, *, is_planned: bool) -> None:
        self.is_planned = is_planned


Ask = Callable[[GenerationRequest], AsyncGenerator[GenerationEvent, None]]
"""Has some engine answer: yields the events of `Engine.generate`, or raises EngineLost."""


async def generate_with_failover(
    request: GenerationRequest, ask: Ask, choice: int = 0
) -> AsyncGenerator[GenerationEvent, None]:
    """The events of a request for one answer, as if a single engine had given it; `choice` is written into them.

    Raises what `ask` raises, and GenerationFailed for a request that ends engines.
    """
    partial = PartialAnswer(request, choice)
    while not partial.is_finished:
        try:
            async with aclosing(ask(partial.remaining_request())) as events:
                async for event in events:
                    for told in partial.take(event):
                        yield told
            if not partial.is_finished:
                raise EngineLost(is_planned=False)
        except EngineLost as lost:
            partial.engine_lost(is_planned=lost.is_planned)


class PartialAnswer:
    """What the caller has received, and so what the next engine has to generate. Pure but for the clock."""

    def __init__(self, request: GenerationRequest, choice: int) -> None:
        self._request = request
        self._choice = choice
        self._ids: list[int] = []
        self._num_engines = 1
        self._num_suspicious = 0  # unplanned losses in a row, at about the same place
        self._num_at_loss = 0  # tokens committed at the first of them
        self._accepted: PromptReady | None = None
        self._accepted_at = 0.0
        self._prefill_s: float | None = None
        self._held: TextDelta | None = None
        self.is_finished = False

    def remaining_request(self) -> GenerationRequest:
        """The request for the next engine, which knows nothing of the answer so far."""
        # Each has a name of its own: an engine that was given up may still hold the request by the old name.
        name = f"{self._request.request_id}.{self._num_engines}" if self._num_engines > 1 else self._request.request_id
        return replace(self._request, request_id=name, committed=(*self._request.committed, *self._ids))

    def take(self, event: GenerationEvent) -> list[GenerationEvent]:
        """What the caller is to receive of an engine's event."""
        match event:
            case PromptReady():
                if self._accepted is not None:  # the first engine's was passed on
                    return []
                self._accepted, self._accepted_at = event, time.monotonic()
            case TextDelta(num_tokens=0):
                # Text held back until the end waits for Finished: if this engine is lost, the next one sends it again.
                self._held = replace(event, choice=self._choice)
                return []
            case TextDelta():
                self._ids += event.ids
                if self._prefill_s is None and self._accepted is not None:
                    self._prefill_s = self._accepted.prepare_s + time.monotonic() - self._accepted_at
                return [replace(event, choice=self._choice)]
            case Finished():
                self.is_finished = True
                return [*([self._held] if self._held else []), self._whole(event)]
        return [event]

    def engine_lost(self, *, is_planned: bool) -> None:
        """An engine is lost and another has to continue; raises GenerationFailed if too many were lost."""
        self._num_engines += 1
        if is_planned:
            return
        if self._num_suspicious and len(self._ids) - self._num_at_loss < CLEARED_AFTER:
            self._num_suspicious += 1
        else:
            self._num_suspicious, self._num_at_loss = 1, len(self._ids)
        if self._num_suspicious == MAX_LOST:
            raise GenerationFailed(f"{MAX_LOST} engines ended at the same point of this request: it is not tried again")

    def _whole(self, last: Finished) -> Finished:
        """`last` with what was counted here over all engines. Speculation is known of the last engine only."""
        first, last = self._accepted, replace(last, choice=self._choice)
        if self._num_engines == 1 or first is None or self._prefill_s is None:
            return last
        return replace(last, completion_tokens=len(self._ids), queue_s=first.queue_s, prefill_s=self._prefill_s)
