"""What an engine counts, told again as Ray's metrics: each node has a page of them, of all engines that run there.

No caller can ask one engine for its /metrics: who calls a deployment gets any of its replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from ray.serve.metrics import Gauge

_EVERY_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Told:
    """One number as Ray takes it."""

    name: str
    value: float
    tags: dict[str, str]


async def tell_ray(registry: CollectorRegistry, model_name: str) -> None:
    """Until it is cancelled. Ray adds which deployment, replica and application it is."""
    gauges: dict[str, Gauge] = {}
    while True:
        try:
            for told in numbers(registry, model_name):
                if (gauge := gauges.get(told.name)) is None:
                    gauge = gauges[told.name] = Gauge(told.name, tag_keys=tuple(told.tags))
                gauge.set(told.value, told.tags)
        except Exception as error:  # whatever ails Ray's metrics, answers do not need them: told again in a while
            _log.warning("Ray does not take the engine's metrics", extra={"why": str(error)})
        await asyncio.sleep(_EVERY_S)


def numbers(registry: CollectorRegistry, model_name: str) -> Iterator[Told]:
    """Every number of the registry, under names that Ray allows: `vidspec:x` is `vidspec_x`, and `ray_vidspec_x` there.

    Counters and buckets are told as they stand: `rate` and `histogram_quantile` do not look at a metric's kind, and
    Ray's own histograms can be told single observations only.
    """
    for metric in registry.collect():
        for sample in metric.samples:
            yield Told(sample.name.replace(":", "_"), sample.value, {"model_name": model_name, **sample.labels})
