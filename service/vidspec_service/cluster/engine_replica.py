"""One engine of a cluster: draft and target on one node, as children of a Ray Serve process; and its metrics."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import CollectorRegistry
from ray.serve.metrics import Gauge

from vidspec_models.request import GenerationRequest, Video
from vidspec_service import __version__
from vidspec_service.api.limits.deadline import background_task
from vidspec_service.engine.cgroups import num_cores
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.interface import EngineInfo, EngineStatus, WorkerState
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.frontend.merge_streams import EventQueue, enqueue_events
from vidspec_service.engine.frontend.workers import check_models
from vidspec_service.engine.types import GenerationEvent, TextDelta
from vidspec_service.errors import EngineDead, RequestError
from vidspec_service.settings import Settings, engine_config
from vidspec_service.telemetry import EngineMetrics, configure_logging

_SHORTEST_PAUSE_S = 0.04  # between two messages of one answer
_METRICS_EVERY_S = 5.0
_PROCESSOR = Path("/proc/cpuinfo")
_PROCESSOR_FACTS = ("vendor_id", "cpu family", "model\t", "flags")

Reply = GenerationEvent | RequestError
"""A RequestError comes last. It is sent, not raised: Ray would log a traceback and count an error of the engine."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a frontend has to know of the engines before it serves."""

    info: EngineInfo
    tokenizer: str  # as its JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStart:
    """The first message of an engine about a request."""

    numerics: str  # if equal, one engine can continue what another began, bit for bit
    clock: float  # the engine's monotonic one, now


class EngineReplica:
    """The actor that Ray Serve calls. It starts the engine and is ready when the engine is."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Raises ConfigError for what a person has to fix."""
        configure_logging(settings.log_level, settings.log_format)
        config = engine_config(settings)
        check_models(config)
        self._held = AsyncExitStack()
        registry = CollectorRegistry()
        self._engine = await self._held.enter_async_context(LocalEngine(config, EngineMetrics(registry)))
        await self._held.enter_async_context(background_task(export_to_ray(registry, self._engine.info.model)))
        self._numerics = numerics_fingerprint(config, self._engine.info, self._engine.status())

    async def facts(self) -> EngineFacts:
        """Equal for all engines, since they have the same configuration."""
        return EngineFacts(info=self._engine.info, tokenizer=self._engine.tokenizer.to_str())

    async def generate(
        self, request: GenerationRequest, videos: tuple[Video, ...]
    ) -> AsyncGenerator[list[StreamStart | Reply], None]:
        """StreamStart, then the events of `Engine.generate`, several at a time; `videos` are those of the request."""
        start: list[StreamStart | Reply] = [StreamStart(numerics=self._numerics, clock=time.monotonic())]
        events = self._engine.generate(replace(request, videos=videos))
        try:
            async with aclosing(in_batches(events, _SHORTEST_PAUSE_S)) as batches:
                async for batch in batches:
                    yield [*start, *batch]
                    start = []
        except EngineDead as error:
            # Until its health was asked for three times, Ray would give it the same requests again, which then fail.
            _log.error("this engine ends; others continue its answers", extra={"why": error.message})
            os._exit(1)

    async def check_health(self) -> None:
        """Ray Serve replaces an engine where this raises."""
        if self._engine.status().workers.get("target") is WorkerState.DEAD:
            raise EngineDead("the target worker is gone and cannot be brought back")

    async def __del__(self) -> None:
        if hasattr(self, "_held"):
            await asyncio.shield(self._held.aclose())


async def in_batches(
    events: AsyncGenerator[GenerationEvent, None], pause_s: float
) -> AsyncGenerator[list[Reply], None]:
    """All events: those within `pause_s` of a batch with text come together; the first and the last come at once.

    A message between two machines takes a millisecond of processor time, a token less. Texts of a batch are merged:
    otherwise each would be an event of its own on the rest of the way, too.
    """
    queue: EventQueue = asyncio.Queue()  # bounded by the answer's max_tokens
    not_before = 0.0
    async with background_task(enqueue_events(events, queue)) as enqueuing:
        while True:
            found = [await queue.get()]
            await asyncio.wait([enqueuing], timeout=max(0.0, not_before - time.monotonic()))
            while not queue.empty():
                found.append(queue.get_nowait())
            batch = [each for each in found if each is not None and not isinstance(each, Exception)]
            if batch:
                yield [*join_texts(batch)]
            if isinstance(found[-1], RequestError):
                yield [found[-1]]
                return
            if isinstance(found[-1], Exception):
                raise found[-1]
            if found[-1] is None:
                return
            if any(isinstance(event, TextDelta) for event in batch):
                not_before = time.monotonic() + pause_s


def join_texts(events: Iterable[GenerationEvent]) -> list[GenerationEvent]:
    """One answer's events with consecutive texts merged, except text that was held back until the answer's end."""
    told: list[GenerationEvent] = []
    for event in events:
        last = told[-1] if told else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta) and event.num_tokens:
            told[-1] = TextDelta.joined([last, event])
        else:
            told.append(event)
    return told


def numerics_fingerprint(config: EngineConfig, info: EngineInfo, status: EngineStatus) -> str:
    """Hash of what decides the last bit of the target's numbers: weights by name, code, libraries, kernels, machine."""
    parts: list[object] = [
        __version__,
        config.target.model,
        config.target.revision,
        config.dycoke,
        config.prefill_chunk or ("chunks by cores", config.target.threads or num_cores()),
    ]
    parts += [info.devices["target"], sorted(info.versions.items()), status.step_paths["target"].how, _processor()]
    # Its memory tells one kind of GPU from another.
    parts += [device.total for device in info.memory["target"].devices if device.device != "cpu"]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _processor() -> list[str]:
    """The facts about the processor by which libraries choose their kernels."""
    first = _PROCESSOR.read_text().partition("\n\n")[0].splitlines() if _PROCESSOR.exists() else []
    return [line for line in first if line.startswith(_PROCESSOR_FACTS)]


async def export_to_ray(registry: CollectorRegistry, model_name: str) -> None:
    """Publish an engine's metrics as Ray's, which each node serves on a page; runs until cancelled.

    No caller can ask a given engine for /metrics: a call to a deployment goes to any of its replicas. Ray adds the
    names of deployment, replica and application.
    """
    gauges: dict[str, Gauge] = {}
    while True:
        refused = None
        for name, value, tags in ray_samples(registry, model_name):
            try:
                if name not in gauges:
                    gauges[name] = Gauge(name, tag_keys=tuple(tags))
                gauges[name].set(value, tags)
            except Exception as error:  # whatever Ray's fault is: answers do not need metrics; tried again later
                refused = {"metric": name, "why": str(error)}
        if refused is not None:
            _log.warning("Ray does not accept a metric of the engine", extra=refused)
        await asyncio.sleep(_METRICS_EVERY_S)


def ray_samples(registry: CollectorRegistry, model_name: str) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Every number of the registry: its name as Ray allows it, its value, its tags.

    `vidspec:x` becomes `vidspec_x`, and `ray_vidspec_x` on Ray's pages.

    Counters and buckets are published as gauges: `rate` and `histogram_quantile` do not look at a metric's type, and
    Ray's own histograms take single observations only.
    """
    for metric in registry.collect():
        for sample in metric.samples:
            yield sample.name.replace(":", "_"), sample.value, {"model_name": model_name, **sample.labels}
