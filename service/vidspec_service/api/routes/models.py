"""GET /v1/models: the one model served here, in OpenAI's list shape."""

from __future__ import annotations

import time

from fastapi import APIRouter

from vidspec_service.api import documents
from vidspec_service.api.answers import ModelCard, ModelList
from vidspec_service.api.deps import Services


def models_router(services: Services) -> APIRouter:
    """The route, on its collaborators."""
    router = APIRouter(tags=["models"])
    created = int(time.time())

    @router.get("/v1/models", summary="List the model", responses=documents.problems(401, 503))
    async def models() -> ModelList:
        """The target model; 503 until it is loaded."""
        return ModelList(data=[ModelCard(id=services.engine.info.model, created=created)])

    return router
