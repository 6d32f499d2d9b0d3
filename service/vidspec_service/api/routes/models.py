"""GET /v1/models, /v1/models/{model}: the one model, under each of its names, in OpenAI's shapes; GET /version."""

from __future__ import annotations

import time
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from vidspec_service import __version__
from vidspec_service.api.errors import check_model_name
from vidspec_service.api.openapi import documents
from vidspec_service.api.schemas.fields import Number
from vidspec_service.api.services import Services


class ModelCard(BaseModel):
    """The model under one of its names, with OpenAI's fields and those that vLLM adds."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vidspec"
    root: str = Field(description="The hub id, or the name of the model's folder.")
    parent: None = None
    max_model_len: int = Field(description="Tokens of a prompt and its answer together.")
    default_sampling: dict[str, Number] = Field(
        description="The checkpoint's sampling defaults, for requests that leave these fields out; empty: greedy."
    )


class ModelList(BaseModel):
    """Every model that is served here."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    """The server's version."""

    version: str


def models_router(services: Services) -> APIRouter:
    """The routes, on their collaborators."""
    router = APIRouter(tags=["models"])
    created = int(time.time())

    def cards() -> dict[str, ModelCard]:
        info = services.engine.info
        return {
            name: ModelCard(
                id=name,
                created=created,
                root=info.root,
                max_model_len=info.context_length,
                default_sampling=info.default_sampling,
            )
            for name in info.model_names
        }

    @router.get("/v1/models", summary="List the model's names", responses=documents.error_responses(401, 503))
    async def models() -> ModelList:
        """The target model, once for each of its names; 503 until it is loaded."""
        return ModelList(data=list(cards().values()))

    @router.get("/v1/models/{model:path}", summary="Get the model", responses=documents.error_responses(401, 404, 503))
    async def one(model: str) -> ModelCard:
        """The target model by one of its names, which may have slashes; 503 until it is loaded."""
        check_model_name(model, services.engine.info.model_names)
        return cards()[model]

    @router.get("/version", summary="The server's version", responses=documents.error_responses(401))
    async def version() -> Version:
        """vidspec's version, on the same route as vLLM's."""
        return Version(version=__version__)

    return router
