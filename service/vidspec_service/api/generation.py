"""One request from its turn to its last token: its engine stream, its clock and what becomes of it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from vidspec_service.api.answers import Summary, VideoFacts
from vidspec_service.api.clips import ClipKey
from vidspec_service.api.deps import Services
from vidspec_service.api.engine_request import Asked, frame_request, generation_request
from vidspec_service.api.guard import ClientGone, Guard
from vidspec_service.api.intake import Intake
from vidspec_service.api.stopwatch import Stopwatch
from vidspec_service.api.summary import summarise, video_facts
from vidspec_service.engine.types import Finished, GenerationEvent, Started, TextDelta
from vidspec_service.errors import GenerationFailed

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Generation:
    """Start it, read its pieces to the end, then ask for the summary. Leaving it cancels what still runs."""

    def __init__(self, services: Services, asked: Asked, intake: Intake, guard: Guard, *, id_prefix: str) -> None:
        self.id = f"{id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = services.engine.info.model
        self._services = services
        self._asked = asked
        self._intake = intake
        self._guard = guard
        self._held = ExitStack()
        self._watch = Stopwatch(services.metrics)
        self._events: AsyncGenerator[GenerationEvent, None] | None = None
        self._video: VideoFacts | None = None  # not the clip: its frames are large, and the engine has them
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._outcome = "abort"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._events is not None:
                await self._events.aclose()  # cancels the request on every worker, unless it has ended
        finally:
            self._held.close()
        if self._started is None:
            return
        self._services.metrics.request_ended(self._outcome, self._watch.elapsed_s)
        facts = {"id": self.id, "outcome": self._outcome, "prompt_tokens": self._started.prompt_tokens}
        if self._finished is not None:
            facts["completion_tokens"] = self._finished.completion_tokens
        _log.info("request ended", extra={**facts, "duration_s": round(self._watch.elapsed_s, 4)})

    @property
    def finish_reason(self) -> str:
        """Known once the pieces are read."""
        return self._complete[2].finish_reason.value

    async def start(self) -> None:
        """Decode and submit; returns when the engine has accepted: a refusal comes before the answer."""
        await self.guarded(self._start())

    async def guarded(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a part of this request under its guard, and remember how it ended."""
        try:
            return await self._guard.run(work)
        except ClientGone:
            raise
        except Exception:
            self._outcome = "error"
            raise

    async def pieces(self) -> AsyncGenerator[str, None]:
        """The answer's text as it is committed; never an empty piece."""
        if self._events is None:
            raise RuntimeError("start() comes first")
        async for event in self._events:
            if isinstance(event, TextDelta):
                self._watch.tokens(event.num_tokens)
                if event.text:
                    yield event.text
            elif isinstance(event, Finished):
                self._finished = event
                self._outcome = event.finish_reason.value
                self._watch.finished(event)
        if self._finished is None:
            raise GenerationFailed("the engine's stream ended without Finished")

    def summary(self) -> Summary:
        """What the answer cost and was made of; known once the pieces are read."""
        video, started, finished = self._complete
        return summarise(video, started, finished, self._watch)

    @property
    def _complete(self) -> tuple[VideoFacts, Started, Finished]:
        if self._video is None or self._started is None or self._finished is None:
            raise RuntimeError("the answer is not complete")
        return self._video, self._started, self._finished

    async def _start(self) -> None:
        services, intake = self._services, self._intake
        await services.turns.take(intake.caller)
        self._held.callback(services.turns.give_back)
        self._watch.turn_came()
        wanted = frame_request(self._asked.options, is_still=intake.file.is_still)
        key = ClipKey(intake.caller, intake.file.content_id, wanted)
        clip = await services.clips.clip(key, intake.file, services.default_num_frames)
        self._watch.decoded()
        self._video = video_facts(intake.file.content_id, clip)
        intake.close()  # an answer takes longer than its frames
        request = generation_request(self.id, self._asked, clip, key.digest, services.settings)
        self._events = services.engine.generate(request)
        first = await anext(self._events, None)
        if not isinstance(first, Started):
            raise GenerationFailed(f"the engine's stream began with {first!r} instead of Started")
        self._started = first
        services.metrics.prompt_accepted(
            prompt_tokens=first.prompt_tokens, video_tokens=first.video_tokens, cached_tokens=first.cached_tokens
        )
