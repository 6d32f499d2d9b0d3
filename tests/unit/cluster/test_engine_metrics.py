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
async def test_a_number_that_ray_does_not_take_is_told_in_the_log_and_tried_again_and_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_refused, taken = 0, dict[str, float]()

    class Choosy:
        def __init__(self, name: str, **_: object) -> None:
            self.name = name

        def set(self, value: float, _: object) -> None:
            nonlocal num_refused
            if "forward" in self.name:
                num_refused += 1
                raise RuntimeError("no room for another metric")
            taken[self.name] = value

    monkeypatch.setattr(engine_replica, "Gauge", Choosy)
    monkeypatch.setattr(engine_replica, "_METRICS_EVERY_S", 0.01)
    registry = CollectorRegistry()
    EngineMetrics(registry)
    names = {name for name, *_ in ray_samples(registry, "a-model")}
    with suppress(TimeoutError):
        await asyncio.wait_for(export_to_ray(registry, "a-model"), 0.2)
    in_a_round = sum("forward" in name for name, *_ in ray_samples(registry, "a-model"))
    assert num_refused > in_a_round > 0, "tried again"
    assert taken.keys() == {name for name in names if "forward" not in name}, "the others are told"
    assert "Ray does not accept a metric" in caplog.text
    assert len(caplog.records) <= 1 + num_refused // in_a_round, "once a round"
