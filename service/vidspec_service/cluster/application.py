"""The Ray Serve application: which deployments there are, their number, resources and routing; and the frontend.

`vidspec_service.cluster.application:application` is the `import_path` in a file for `serve deploy` or in a RayService;
its `args` are settings.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from vidspec_service import __version__
from vidspec_service.api.limits.deadline import background_task
from vidspec_service.api.server import running_app
from vidspec_service.api.services import open_remotes
from vidspec_service.cluster.engine_replica import EngineReplica
from vidspec_service.cluster.ray_engine import ENGINES, RayEngine, wait_for_engine
from vidspec_service.decoding.pool import DecodePool
from vidspec_service.settings import ClusterSettings, ReplicaRange, decoding_limits, load_settings
from vidspec_service.telemetry import Metrics, configure_logging

_DRAIN_COUNT_EVERY_S = 0.1
_BUSY = 0.75  # of an engine's max_running_requests: with more, another engine is started
# Requests that an engine takes, as a multiple of those it generates at once. With 1 a busy cluster sends half of the
# follow-up requests to engines without their video, and this work makes it busier still (`vidspec bench cluster`).
_FULL = 2
_ROUTER = RequestRouterConfig(
    request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    # Points of an engine on the hash ring. With Ray's 100 some engines get a fifth more videos; see the same bench.
    request_router_kwargs={"num_virtual_nodes": 1000},
)
_OF_BOTH = {
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 30.0,
    "logging_config": LoggingConfig(enable_access_log=False),  # the API's own log has a line for every request
}
_ANY_NUMBER = 10_000  # of requests in a frontend: its own limits answer with an error that says what to do


class Frontend:
    """The API and the decode children, as in `vidspec serve`, called by Ray Serve's proxy."""

    async def __init__(self, settings: ClusterSettings, engines: DeploymentHandle) -> None:  # type: ignore[misc]  # awaited
        """Ready as soon as an engine is; raises ConfigError."""
        configure_logging(settings.log_level, settings.log_format)
        at_once = ReplicaRange.parse(settings.engines)
        # A single frontend may keep all engines busy; Ray's router sees which of them are free.
        settings = settings.model_copy(update={"max_running_requests": settings.max_running_requests * at_once.max})
        metrics = Metrics(CollectorRegistry())
        async with AsyncExitStack() as stack:
            remotes = await stack.enter_async_context(open_remotes(settings))
            facts = await wait_for_engine(engines, settings.start_timeout_s)
            engine = RayEngine(engines, facts, metrics, may_sleep=at_once.min == 0)
            await stack.enter_async_context(background_task(engine.count_engines()))
            limits = decoding_limits(settings, engine.info.default_num_frames)
            pool = await stack.enter_async_context(DecodePool(limits, settings.decode_workers))
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


def application(args: dict[str, Any]) -> Application:
    """`args` are settings by name, which override the environment of the machine this runs on; raises ConfigError."""
    return application_of(load_settings(ClusterSettings, args))


def application_of(settings: ClusterSettings) -> Application:
    """Two deployments, each scaled by itself."""
    engines = serve.deployment(EngineReplica).options(
        name=ENGINES,
        **_replica_options(settings.engines, settings),
        # Above this, load beats affinity: the next engine on the ring is asked; if all are full, requests wait.
        max_ongoing_requests=_FULL * settings.max_running_requests,
        request_router_config=_ROUTER,
        # One actor per engine, so that the engine's processes share a node, its GPUs, and their channels.
        ray_actor_options={"num_cpus": settings.engine_cpus, "num_gpus": settings.engine_gpus},
        graceful_shutdown_wait_loop_s=_DRAIN_COUNT_EVERY_S,
        graceful_shutdown_timeout_s=settings.engine_drain_s or settings.drain_timeout_s,
    )
    frontends = serve.deployment(serve.ingress()(Frontend)).options(
        name="Frontend",
        **_replica_options(settings.frontends, settings),
        max_ongoing_requests=_ANY_NUMBER,
        ray_actor_options={"num_cpus": settings.frontend_cpus},
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
    )
    return frontends.bind(settings, engines.bind(settings))


def _replica_options(number: str, settings: ClusterSettings) -> dict[str, Any]:
    replicas = ReplicaRange.parse(number)
    if replicas.min == replicas.max:
        return {"num_replicas": replicas.max, **_OF_BOTH}
    scaling = AutoscalingConfig(
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        target_ongoing_requests=_BUSY * settings.max_running_requests,
        downscale_delay_s=settings.engine_idle_s,
    )
    return {"autoscaling_config": scaling, **_OF_BOTH}
