"""POST /v1/chat/completions: the same answers in the words of OpenAI's API, for its clients."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from vidspec_service.api import documents
from vidspec_service.api.answering import Spoken, answered
from vidspec_service.api.body import BodyReader
from vidspec_service.api.deps import Services
from vidspec_service.api.dialects import OpenAIDialect
from vidspec_service.api.openai_schemas import ChatCompletion
from vidspec_service.api.problems import ModelNotFound


def chat_completions_router(services: Services) -> APIRouter:
    """The route, on its collaborators."""
    router = APIRouter(tags=["chat"])

    async def read(reader: BodyReader) -> Spoken:
        body = await reader.json(ChatCompletion)
        served = services.engine.info.model
        if body.model not in (None, served):
            raise ModelNotFound(f"The model that is served here is {served!r}.", param="model")
        return body, OpenAIDialect(includes_usage=body.includes_usage)

    @router.post(
        "/v1/chat/completions",
        summary="Ask about a video, as OpenAI's clients do",
        responses=documents.CHAT_COMPLETION_RESPONSES,
        openapi_extra=documents.CHAT_COMPLETION_BODY,
    )
    async def chat_completions(request: Request) -> Response:
        """A conversation with one video among its parts; get the answer whole or, with `stream`, in chunks."""
        return await answered(request, services, read)

    return router
