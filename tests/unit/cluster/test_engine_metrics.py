"""An engine's metrics reach Ray completely: each sample, under a name that Ray accepts, with its labels."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry
from ray.serve.metrics import Gauge

from vidspec_service.cluster import engine_replica
from vidspec_service.cluster.engine_replica import export_to_ray, ray_samples
from vidspec_service.telemetry import EngineMetrics


def told() -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    metrics.forward["target"].observe(0.004)
    metrics.worker_idle_ratio.labels("draft").set(0.25)
    metrics.spec_decode_num_accepted_tokens_per_pos.labels("0").inc(3)
    found = {}
    for name, value, tags in ray_samples(registry, "a-model"):
        assert tags.pop("model_name") == "a-model"
        found[(name, *tags.values())] = value
    return found


def test_counters_gauges_and_every_bucket_are_told_as_they_stand() -> None:
    found = told()
    assert found["vidspec_worker_idle_ratio", "draft"] == 0.25
    assert found["vidspec_spec_decode_num_accepted_tokens_per_pos_total", "0"] == 3
    assert found["vidspec_target_forward_seconds_bucket", "0.003"] == 0
    assert found["vidspec_target_forward_seconds_bucket", "0.005"] == 1
    assert found["vidspec_target_forward_seconds_bucket", "+Inf"] == 1
    assert found["vidspec_target_forward_seconds_sum",] == pytest.approx(0.004)


def test_ray_takes_all_names() -> None:
    """Ray warns of colons and drops samples with invalid names; warnings are errors here."""
    for name, *_ in told():
        assert not Gauge(name)._discard_metric


def test_nothing_of_the_api_is_told_by_an_engine() -> None:
    assert not [name for name, *_ in told() if "http" in name or "first_token" in name or "python" in name]


@pytest.mark.anyio
async def test_a_number_that_ray_does_not_take_is_told_in_the_log_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Ailing:
        num_made = 0

        def __init__(self, *_: object, **__: object) -> None:
            Ailing.num_made += 1
            raise RuntimeError("no room for another metric")

    monkeypatch.setattr(engine_replica, "Gauge", Ailing)
    monkeypatch.setattr(engine_replica, "_METRICS_EVERY_S", 0.01)
    registry = CollectorRegistry()
    EngineMetrics(registry)
    with suppress(TimeoutError):
        await asyncio.wait_for(export_to_ray(registry, "a-model"), 0.2)
    assert Ailing.num_made > 1
    assert "Ray does not accept the engine's metrics" in caplog.text
