"""POST /tokenize, /detokenize, as in vLLM, and /v1/responses/input_tokens. Runs off the event loop, under a permit."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from tokenizers import Tokenizer

from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_service.api.errors import check_model_name
from vidspec_service.api.limits.deadline import Deadline
from vidspec_service.api.openapi import documents
from vidspec_service.api.schemas.responses import ResponsesRequest
from vidspec_service.api.schemas.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    InputTokens,
    TokenizeRequest,
    TokenizeResponse,
    check_text,
)
from vidspec_service.api.services import Services
from vidspec_service.api.uploads.upload import Upload
from vidspec_service.engine.frontend.interface import Engine
from vidspec_service.engine.types import PromptReady

T = TypeVar("T", TokenizeRequest, DetokenizeRequest, ResponsesRequest)


def tokens_router(services: Services) -> APIRouter:
    """The routes, on their collaborators."""
    router = APIRouter(tags=["models"])
    engine = services.engine

    @asynccontextmanager
    async def permitted(request: Request, model: type[T]) -> AsyncIterator[tuple[T, str, Deadline]]:
        """The body, its caller, and the deadline for the work on it."""
        with services.permit(request) as permit:
            info = engine.info  # raises EngineDead before a byte is read
            with closing(Upload(request, permit, services.upload_dir, services.settings)) as upload:
                body = await upload.fields(json=model)
            check_model_name(body.model, info.model_names)
            yield body, permit.caller, services.deadline(permit, request.receive)

    @router.post("/tokenize", summary="The tokens of a text", response_model=TokenizeResponse, **documents.TOKENIZE)
    async def tokenize(request: Request) -> Response:
        """The tokens of a text; for a conversation without videos, the number of tokens after the chat template."""
        async with permitted(request, TokenizeRequest) as (body, caller, deadline):
            length = engine.info.context_length
            if body.prompt is None:
                count = await deadline.run(_count(engine, body, caller))
                content = TokenizeResponse(
                    count=count, max_model_len=length, tokens=None, token_strs=None
                ).model_dump_json()
            else:
                content = await asyncio.to_thread(_tokenized, engine.tokenizer, body.prompt, body, length)
            return Response(content, media_type="application/json")

    @router.post("/detokenize", summary="The text of tokens", **documents.DETOKENIZE)
    async def detokenize(request: Request) -> DetokenizeResponse:
        """The text of token ids, special tokens included."""
        async with permitted(request, DetokenizeRequest) as (body, _, _):
            text = await asyncio.to_thread(engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
            return DetokenizeResponse(prompt=text)

    @router.post("/v1/responses/input_tokens", summary="Count a response's input tokens", **documents.INPUT_TOKENS)
    async def input_tokens(request: Request) -> InputTokens:
        """The number of tokens of a request to /v1/responses that has no videos and images."""
        async with permitted(request, ResponsesRequest) as (body, caller, deadline):
            body = await asyncio.to_thread(body.for_engine, engine.info)
            check_text(body.turns, "input")
            return InputTokens(input_tokens=await deadline.run(_count(engine, body, caller)))

    return router


def _tokenized(tokenizer: Tokenizer, prompt: str, body: TokenizeRequest, max_model_len: int) -> str:
    """The answer as JSON, which may have hundreds of thousands of tokens."""
    with_special = body.add_special_tokens is not False
    (found,) = tokenizer.encode_batch_fast([prompt], add_special_tokens=with_special)  # `encode` keeps the GIL
    ids = found.ids
    strings = [tokenizer.id_to_token(token) or "" for token in ids] if body.return_token_strs else None
    return TokenizeResponse(
        count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=strings
    ).model_dump_json()


async def _count(engine: Engine, body: TokenizeRequest | ResponsesRequest, caller: str) -> int:
    """The number of prompt tokens, which the target tells before it generates; the generation is then cancelled."""
    asked = GenerationRequest(
        request_id=f"tokenize-{secrets.token_hex(12)}",
        caller=caller,
        turns=body.turns,
        template=body.template,
        max_tokens=1,
        speculation=SpeculationMode.OFF,
    )
    async with aclosing(engine.generate(asked)) as events:
        first = await anext(events)
        assert isinstance(first, PromptReady)
        return first.prompt_tokens
