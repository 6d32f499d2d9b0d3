"""POST /tokenize, /detokenize: what a text is for the model, as vLLM tells it. Off the loop, under a permit."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TypeVar

from fastapi import APIRouter, Request

from vidspec_service.api.errors import check_served
from vidspec_service.api.limits.admission import caller_of, sharer_of
from vidspec_service.api.openapi import documents
from vidspec_service.api.schemas.tokens import Detokenize, Detokenized, Tokenize, Tokenized
from vidspec_service.api.services import Services
from vidspec_service.api.uploads.upload import Upload
from vidspec_service.engine.frontend.interface import EngineInfo

T = TypeVar("T", Tokenize, Detokenize)


def tokens_router(services: Services) -> APIRouter:
    """The routes, on their collaborators."""
    router = APIRouter(tags=["models"])
    engine = services.engine

    async def read(request: Request, model: type[T]) -> T:
        with services.admission.permit(caller_of(request), sharer_of(request)) as permit:
            info: EngineInfo = services.engine.info  # raises EngineDead before a byte is read
            with closing(Upload(request, permit, services.upload_dir, services.settings)) as upload:
                body = await upload.fields(json=model)
            check_served(body.model, info.model_names)
            return body

    @router.post(
        "/tokenize",
        summary="The tokens of a text",
        responses=documents.problems(*documents.TEXT_STATUSES),
        openapi_extra=documents.TOKENIZE_BODY,
    )
    async def tokenize(request: Request) -> Tokenized:
        """Of a text as it is; what a conversation takes is in the usage of its answer."""
        body = await read(request, Tokenize)
        with_special = body.add_special_tokens is not False
        found = await asyncio.to_thread(engine.tokenizer.encode, body.prompt, add_special_tokens=with_special)
        return Tokenized(
            count=len(found.ids),
            max_model_len=engine.info.context_length,
            tokens=found.ids,
            token_strs=found.tokens if body.return_token_strs else None,
        )

    @router.post(
        "/detokenize",
        summary="The text of tokens",
        responses=documents.problems(*documents.TEXT_STATUSES),
        openapi_extra=documents.DETOKENIZE_BODY,
    )
    async def detokenize(request: Request) -> Detokenized:
        """What ids say, special tokens included."""
        body = await read(request, Detokenize)
        return Detokenized(
            prompt=await asyncio.to_thread(engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
        )

    return router
