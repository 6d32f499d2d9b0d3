"""The routes that generate: POST /v1/video-chat, and OpenAI's chat completions, completions and responses.

All do the same: admit, read, decode, submit; then stream the answer, or send it whole.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack

from fastapi import APIRouter, Request, Response

from vidspec_service.api.errors import status_of
from vidspec_service.api.generate.generation import Generation
from vidspec_service.api.generate.streaming import EventStream
from vidspec_service.api.openapi import documents
from vidspec_service.api.schemas.chat_completions import ChatCompletionRequest
from vidspec_service.api.schemas.chat_request import ChatRequest
from vidspec_service.api.schemas.completions import CompletionRequest
from vidspec_service.api.schemas.responses import ResponsesRequest
from vidspec_service.api.schemas.video_chat import VideoChatForm, VideoChatJson
from vidspec_service.api.services import Services
from vidspec_service.api.uploads.upload import Upload
from vidspec_service.errors import InvalidRequest


def chat_router(services: Services) -> APIRouter:
    """The routes, on their collaborators."""
    router = APIRouter(tags=["chat"])

    @router.post("/v1/video-chat", summary="Ask about videos", **documents.VIDEO_CHAT)
    async def video_chat(request: Request) -> Response:
        """Send videos and a question; get the answer whole or, with `stream`, as it is generated."""
        return await _answer(request, services, VideoChatJson, VideoChatForm)

    @router.post(
        "/v1/chat/completions", summary="Ask about videos with OpenAI's chat completions", **documents.CHAT_COMPLETION
    )
    async def chat_completions(request: Request) -> Response:
        """Send a conversation that may have videos and images; get the answer whole or, with `stream`, in chunks."""
        return await _answer(request, services, ChatCompletionRequest)

    @router.post("/v1/completions", summary="Continue a text", **documents.COMPLETION)
    async def completions(request: Request) -> Response:
        """Send a text, without template and videos; get its continuation whole or, with `stream`, in chunks."""
        return await _answer(request, services, CompletionRequest)

    @router.post("/v1/responses", summary="Ask about videos with OpenAI's responses", **documents.RESPONSE)
    async def responses(request: Request) -> Response:
        """Does what /v1/chat/completions does, but answers with items and named events. Nothing is stored."""
        return await _answer(request, services, ResponsesRequest)

    return router


async def _answer(
    request: Request, services: Services, json: type[ChatRequest], form: type[ChatRequest] | None = None
) -> Response:
    settings = services.settings
    async with AsyncExitStack() as held:
        traces, route = services.traces, f"POST {request.url.path}"
        trace = None if traces is None else traces.begin(request.headers, route, status_of)
        if trace is not None:
            held.enter_context(trace)
        permit = held.enter_context(services.permit(request))
        info = services.engine.info  # raises EngineDead before a byte is uploaded
        upload = Upload(request, permit, services.upload_dir, settings)
        held.callback(upload.close)
        body = await upload.fields(json=json, form=form)
        body = await asyncio.to_thread(body.for_engine, info)  # the grammar of a hundred tools takes long
        num_answers = _num_answers(body, services)
        if (reason := info.why_not(body.compression or settings.compression)) is not None:
            raise InvalidRequest(reason, param="compression")
        permit.hold_places(num_answers)
        deadline = services.deadline(permit, request.receive)
        if (grammar := body.grammar) is not None:
            read = await deadline.run(services.grammars.check(grammar, permit.caller))
            body = body.model_copy(update={"grammar": read})
        files = await deadline.run(upload.videos(body.sources, services.videos, services.fetcher))
        frames, is_streamed, dialect = body.frames, body.stream, body.dialect
        name = f"{dialect.id_prefix}{secrets.token_hex(12)}"
        asked = body.generation_requests(name, settings)
        del body  # its base64 may be large, and generating takes long
        generation = Generation(services, name, asked, deadline, trace)
        held.push_async_callback(generation.close)
        await generation.run(generation.start(upload, files, frames))
        if is_streamed:
            return EventStream(generation, dialect, held.pop_all(), settings.keep_alive_s)
        choices = await generation.run(generation.collect())
        facts = {**generation.facts(), **generation.take_extras()}
        # In a thread: log probabilities may be many megabytes.
        content = await asyncio.to_thread(dialect.full_body, generation.head, choices, facts)
        return Response(content, media_type="application/json", headers=generation.headers)


def _num_answers(body: ChatRequest, services: Services) -> int:
    """Answers to all prompts; raises InvalidRequest for more than the operator allows."""
    settings, n, num_prompts = services.settings, body.n or 1, len(body.prompts)
    limits = {"VIDSPEC_MAX_RUNNING_REQUESTS": settings.max_running_requests}
    if settings.max_requests_per_key is not None:
        limits["VIDSPEC_MAX_REQUESTS_PER_KEY"] = settings.max_requests_per_key
    name = min(limits, key=lambda each: limits[each])
    if n > limits[name]:
        raise InvalidRequest(f"n is {n}; the limit is {limits[name]} answers at a time ({name}).", param="n")
    if n * num_prompts > (most := services.admission.max_places):
        name = (
            "VIDSPEC_MAX_REQUESTS_PER_KEY" if most == settings.max_requests_per_key else "VIDSPEC_MAX_QUEUED_REQUESTS"
        )
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {n} ask for {n * num_prompts} answers; the limit of a request is {most} "
            f"({name}): send several requests.",
            param="prompt",
        )
    return n * num_prompts
