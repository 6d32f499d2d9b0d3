"""One frontend of a cluster: API and decoding children as those of `vidspec serve`, behind Ray Serve's proxy."""

from __future__ import annotations

from contextlib import AsyncExitStack

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray.serve.handle import DeploymentHandle

from vidspec_service import __version__
from vidspec_service.api.server import running_app
from vidspec_service.api.services import open_remotes
from vidspec_service.cluster.ray_engine import RayEngine
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.settings import ClusterSettings, Copies, decoding_limits
from vidspec_service.telemetry import Metrics, configure_logging


class Frontend:
    """What Ray Serve calls with HTTP requests."""

    async def __init__(self, settings: ClusterSettings, engines: DeploymentHandle) -> None:  # type: ignore[misc]  # awaited
        """Ready as soon as an engine is; raises ConfigError."""
        configure_logging(settings.log_level, settings.log_format)
        at_once = Copies.parse(settings.engines)
        # It may keep all engines busy; which of them is free is seen by those who ask them.
        settings = settings.model_copy(update={"max_running_requests": settings.max_running_requests * at_once.most})
        metrics = Metrics(CollectorRegistry())
        async with AsyncExitStack() as stack:
            remotes = await stack.enter_async_context(open_remotes(settings))
            engine = RayEngine(engines, metrics, may_sleep=at_once.least == 0)
            await stack.enter_async_context(engine.started(settings.start_timeout_s))
            pool = await stack.enter_async_context(DecodePool(decoding_limits(settings), settings.decode_workers))
            self._app, _ = await stack.enter_async_context(running_app(settings, engine, pool.decode, metrics, remotes))
            self._held = stack.pop_all()
        info = engine.info
        models = {"model": info.model, "draft_model": info.draft_model or ""}
        metrics.build.info({"version": __version__, **models, **info.versions})

    def __serve_build_asgi_app__(self) -> FastAPI:  # Ray Serve's name for it
        return self._app

    async def __del__(self) -> None:
        if hasattr(self, "_held"):
            await self._held.aclose()
