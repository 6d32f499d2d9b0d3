"""POST /v1/video-chat: one video and a question or conversation, one answer."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from vidspec_service.api import documents
from vidspec_service.api.answering import Spoken, answered
from vidspec_service.api.body import BodyReader
from vidspec_service.api.deps import Services
from vidspec_service.api.dialects import NativeDialect
from vidspec_service.api.schemas import VideoChatForm, VideoChatJson


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
        return await answered(request, services, _read)

    return router


async def _read(reader: BodyReader) -> Spoken:
    return await reader.form_or_json(VideoChatForm, VideoChatJson), NativeDialect()
