"""POST /v1/video-chat: admit, read, decode, submit; then stream the answer, or send it whole."""

from __future__ import annotations

from contextlib import AsyncExitStack

from fastapi import APIRouter, Request, Response

from vidspec_service.api import documents
from vidspec_service.api.body import Asked, BodyReader
from vidspec_service.api.deps import Services
from vidspec_service.api.generation import Generation
from vidspec_service.api.guard import Guard
from vidspec_service.api.problems import UploadTimeout
from vidspec_service.api.streaming import StreamedAnswer, whole_answer


def video_chat_router(services: Services) -> APIRouter:
    """The route, on its collaborators."""
    router = APIRouter(tags=["chat"])

    @router.post(
        "/v1/video-chat",
        summary="Ask about a video",
        responses=documents.VIDEO_CHAT_RESPONSES,
        openapi_extra=documents.VIDEO_CHAT_BODY,
    )
    async def video_chat(request: Request) -> Response:
        """Send one video and a question; get the answer whole or, with `stream`, as it is generated."""
        async with AsyncExitStack() as held:
            held.enter_context(services.admission.slot())
            _ = services.engine.info  # raises EngineDead before a byte is uploaded
            asked = await _read(request, services, held)
            guard = Guard(request.receive, services.admission.closing, services.settings.request_timeout_s)
            generation = await held.enter_async_context(Generation(services, asked, guard))
            await generation.start()
            if asked.chat.stream:
                return StreamedAnswer(generation, held.pop_all(), services.settings.keep_alive_s)
            return await whole_answer(generation)

    return router


async def _read(request: Request, services: Services, held: AsyncExitStack) -> Asked:
    limit_s = services.settings.upload_timeout_s
    late = UploadTimeout(f"The body took longer than {limit_s:g} s to arrive (VIDSPEC_UPLOAD_TIMEOUT_S).")
    reader = BodyReader(request, services.settings, services.upload_dir)
    held.enter_context(reader.cleaning_up())
    return await Guard(None, services.admission.closing, limit_s, late).run(reader.read())
