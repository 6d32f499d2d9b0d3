"""GET /v1/models, /v1/models/{model}: the one model served here, in OpenAI's shapes."""

from __future__ import annotations

import time

from fastapi import APIRouter

from vidspec_service.api.errors import ModelNotFound
from vidspec_service.api.openapi import documents
from vidspec_service.api.schemas.answers import ModelCard, ModelList
from vidspec_service.api.services import Services


def models_router(services: Services) -> APIRouter:
    """The route, on its collaborators."""
    router = APIRouter(tags=["models"])
    created = int(time.time())

    def card() -> ModelCard:
        return ModelCard(id=services.engine.info.model, created=created)

    @router.get("/v1/models", summary="List the model", responses=documents.problems(401, 503))
    async def models() -> ModelList:
        """The target model; 503 until it is loaded."""
        return ModelList(data=[card()])

    @router.get("/v1/models/{model:path}", summary="Look at the model", responses=documents.problems(401, 404, 503))
    async def one(model: str) -> ModelCard:
        """The target model by its name, which may have slashes; 503 until it is loaded."""
        if model != card().id:
            raise ModelNotFound(f"The model that is served here is {card().id!r}.", param="model")
        return card()

    return router
