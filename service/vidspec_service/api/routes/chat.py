"""The routes that answer: POST /v1/video-chat; /v1/chat/completions and /v1/completions in the words of OpenAI's API.

All go one way: admit, read, decode, submit; then stream the answer, or send it whole.
"""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from vidspec_service.api.generate.generation import Generation
from vidspec_service.api.generate.streaming import EventStream
from vidspec_service.api.limits.admission import caller_of, sharer_of
from vidspec_service.api.openapi import documents
from vidspec_service.api.schemas.chat_completions import ChatCompletion
from vidspec_service.api.schemas.completions import TextCompletion
from vidspec_service.api.schemas.logprobs import logprobs_of
from vidspec_service.api.schemas.video_chat import ChatRequest, VideoChatForm, VideoChatJson
from vidspec_service.api.services import Services
from vidspec_service.api.uploads.sources import take_all
from vidspec_service.api.uploads.upload import Upload


def chat_router(services: Services) -> APIRouter:
    """The routes, on their collaborators."""
    router = APIRouter(tags=["chat"])

    @router.post(
        "/v1/video-chat",
        summary="Ask about videos",
        responses=documents.VIDEO_CHAT_RESPONSES,
        openapi_extra=documents.VIDEO_CHAT_BODY,
    )
    async def video_chat(request: Request) -> Response:
        """Send videos and a question; get the answer whole or, with `stream`, as it is generated."""
        return await _answer(request, services, VideoChatJson, VideoChatForm)

    @router.post(
        "/v1/chat/completions",
        summary="Ask about videos, as OpenAI's clients do",
        responses=documents.CHAT_COMPLETION_RESPONSES,
        openapi_extra=documents.CHAT_COMPLETION_BODY,
    )
    async def chat_completions(request: Request) -> Response:
        """A conversation with videos and images among its parts; get the answer whole or, with `stream`, in chunks."""
        return await _answer(request, services, ChatCompletion)

    @router.post(
        "/v1/completions",
        summary="Go on with a text",
        responses=documents.COMPLETION_RESPONSES,
        openapi_extra=documents.COMPLETION_BODY,
    )
    async def completions(request: Request) -> Response:
        """A text without template and videos; get what follows whole or, with `stream`, in chunks."""
        return await _answer(request, services, TextCompletion)

    return router


async def _answer(
    request: Request, services: Services, json: type[ChatRequest], form: type[ChatRequest] | None = None
) -> Response:
    settings = services.settings
    async with AsyncExitStack() as held:
        permit = held.enter_context(services.admission.permit(caller_of(request), sharer_of(request)))
        info = services.engine.info  # raises EngineDead before a byte is uploaded
        upload = Upload(request, permit, services.upload_dir, settings)
        held.callback(upload.close)
        body = await upload.fields(json=json, form=form)
        body.check_model(info.model_names)
        deadline = services.deadline(permit, request.receive)
        if (grammar := body.grammar) is not None:
            await deadline.run(services.grammars.check(grammar))
        files = await deadline.run(take_all(upload, body.sources, services.videos, services.fetcher))
        frames, is_streamed, dialect = body.frames, body.stream, body.dialect
        request_id = f"{dialect.id_prefix}-{secrets.token_hex(12)}"
        asked = body.generation_request(request_id, settings.speculation, settings.compression, info.default_sampling)
        del body  # its base64 may be large, and an answer takes its time
        generation = Generation(services, asked, deadline)
        held.push_async_callback(generation.close)
        await generation.run(generation.start(upload, files, frames))
        if is_streamed:
            return EventStream(generation, dialect, held.pop_all(), settings.keep_alive_s)
        choice = await generation.run(_choice(generation))
        whole = dialect.whole.model_validate({**generation.head, "choices": [choice], **generation.facts()})
        return Response(whole.model_dump_json(), media_type="application/json")


async def _choice(generation: Generation) -> dict[str, Any]:
    async with aclosing(generation.pieces()) as found:
        pieces = [piece async for piece in found]
    logprobs = logprobs_of(each for piece in pieces for each in piece.logprobs) if generation.tells_logprobs else None
    message = {"content": "".join(piece.text for piece in pieces)}
    return {"message": message, "logprobs": logprobs, "finish_reason": generation.finish_reason}
