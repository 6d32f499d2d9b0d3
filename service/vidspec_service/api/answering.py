"""Answering: the way of a request from its body to its answer, the same in every dialect."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from vidspec_service.api.access import caller_of
from vidspec_service.api.body import BodyReader
from vidspec_service.api.deps import Services
from vidspec_service.api.dialects import Dialect
from vidspec_service.api.engine_request import Asked
from vidspec_service.api.generation import Generation
from vidspec_service.api.guard import Guard
from vidspec_service.api.intake import Intake
from vidspec_service.api.problems import UploadTimeout
from vidspec_service.api.schemas import Options, Source
from vidspec_service.api.streaming import StreamedAnswer, whole_answer
from vidspec_service.engine.types import ChatMessage


class Question(Protocol):
    """What the bodies of all dialects have in common."""

    @property
    def source(self) -> Source:
        """Where the video is."""
        ...

    @property
    def turns(self) -> tuple[ChatMessage, ...]:
        """The conversation."""
        ...

    def options(self) -> Options:
        """How to answer, and which frames to look at."""
        ...


F = TypeVar("F")
Read = Callable[[BodyReader], Coroutine[Any, Any, F]]
Spoken = tuple[Question, Dialect]


async def answered(request: Request, services: Services, read: Read[Spoken]) -> Response:
    """Admit, read, then wait for a turn, decode and submit; then stream the answer, or send it whole."""
    async with AsyncExitStack() as held:
        caller = caller_of(request)
        place = held.enter_context(services.admission.place(caller))
        _ = services.engine.info  # raises EngineDead before a byte is uploaded
        intake = held.enter_context(Intake(services, caller, place))
        asked, dialect, guard = await _asked(request, services, intake, read)
        generation = Generation(services, asked, intake, guard, id_prefix=dialect.id_prefix)
        await held.enter_async_context(generation)
        await generation.start()
        if asked.options.stream:
            return StreamedAnswer(generation, dialect, held.pop_all(), services.settings.keep_alive_s)
        return await whole_answer(generation, dialect)


async def received(request: Request, services: Services, intake: Intake, read: Read[F]) -> F:
    """A body's fields, if it arrives in time."""
    limit_s = services.settings.upload_timeout_s
    late = UploadTimeout(f"The body took longer than {limit_s:g} s to arrive (VIDSPEC_UPLOAD_TIMEOUT_S).")
    reader = BodyReader(request, intake, services.settings.max_json_bytes)
    return await Guard(None, services.admission.closing, limit_s, late).run(read(reader))


def guard_of(request: Request, services: Services) -> Guard:
    """What ends the work for a request whose body has come; its deadline counts from now."""
    return Guard(request.receive, services.admission.closing, services.settings.request_timeout_s)


async def _asked(
    request: Request, services: Services, intake: Intake, read: Read[Spoken]
) -> tuple[Asked, Dialect, Guard]:
    """Nothing of a body outlives this but what is needed: its base64 may be large, and an answer takes its time."""
    question, dialect = await received(request, services, intake, read)
    guard = guard_of(request, services)
    await guard.run(intake.take(question.source))
    return Asked(question.options(), question.turns), dialect, guard
