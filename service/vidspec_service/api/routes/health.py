"""GET /health/live (the process answers), /health/ready and vLLM's /health (it can serve), /metrics (what it did)."""

from __future__ import annotations

from typing import Any, Literal

from cachetools import TTLCache, cached
from fastapi import APIRouter, Response
from pydantic import BaseModel

from vidspec_service.api.openapi import documents
from vidspec_service.api.services import Services
from vidspec_service.engine.frontend.interface import WorkerState
from vidspec_service.settings import engine_config

_PAGE_S = 1.0  # how long a page is reused: writing one takes 10 ms, in which nothing else runs
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class Health(BaseModel):
    """Whether the process, or the whole service, works; `reasons` says why not, `warnings` why it is slow."""

    status: Literal["ok", "unavailable"]
    reasons: list[str] = []
    warnings: list[str] | None = None  # left out where there are none


def health_router(services: Services) -> APIRouter:
    """The routes, on their collaborators."""
    router = APIRouter(tags=["operation"])
    (model_name, *_) = engine_config(services.settings).model_names  # known before the model is loaded
    unavailable: dict[int | str, dict[str, Any]] = {
        503: {"model": Health, "description": "Not ready; `reasons` says why."}
    }

    @router.head("/health/live", include_in_schema=False)
    @router.get("/health/live", summary="Is the process alive?", response_model_exclude_none=True)
    async def live() -> Health:
        """200 as long as the process answers, whatever the state of the workers. Restart the process if this fails."""
        return Health(status="ok")

    def reasons_against() -> list[str]:
        status = services.engine.status()
        reasons = ["draining"] if services.admission.is_draining else []
        if not status.is_ready:
            reasons.append(f"target worker is {status.workers.get('target', WorkerState.STARTING)}")
        return reasons

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Can it serve? In vLLM's form", response_class=Response, responses=documents.HEALTH)
    async def health() -> Response:
        """The same status as `/health/ready`, without a body."""
        return Response(status_code=503 if reasons_against() else 200)

    @router.head("/health/ready", include_in_schema=False)
    @router.get("/health/ready", summary="Can it serve?", responses=unavailable, response_model_exclude_none=True)
    async def ready(response: Response) -> Health:
        """200 if a request would be served; 503 while models load, after a worker's crash and while shutting down.

        `warnings` says what makes the server several times slower, such as kernels that did not compile.
        """
        reasons, warnings = reasons_against(), services.engine.status().warnings
        response.status_code = 503 if reasons else 200
        return Health(status="unavailable" if reasons else "ok", reasons=reasons, warnings=warnings or None)

    if services.settings.metrics:
        _add_metrics(router, services, model_name)
    return router


def _add_metrics(router: APIRouter, services: Services, model_name: str) -> None:
    @cached(TTLCache(1, _PAGE_S))
    def written() -> bytes:
        status, metrics = services.engine.status(), services.metrics
        metrics.num_requests_running.set(status.num_running)
        metrics.num_requests_waiting.set(services.admission.num_outside_engine + status.num_waiting)
        num_videos, num_bytes = services.videos.usage
        metrics.stored_videos.set(num_videos)
        metrics.stored_video_bytes.set(num_bytes)
        for role, state in status.workers.items():
            metrics.worker_ready.labels(role).set(state is WorkerState.READY)
        for role, path in status.step_paths.items():
            metrics.worker_fallback.labels(role).set(bool(path.fallback))
        return metrics.exposition(model_name)

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response, responses=documents.METRICS)
    async def metrics() -> Response:
        """Always in the text format, at most a second old. Counts all callers together."""
        return Response(written(), media_type=_EXPOSITION)
