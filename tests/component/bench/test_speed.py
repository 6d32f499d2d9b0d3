"""A complete comparison on the bundled pair and the channel round trip, with real processes."""

from __future__ import annotations

import json

import pytest

from vidspec_service.bench.speed.costs import measure_round_trip
from vidspec_service.bench.speed.options import Mode, SpeedOptions
from vidspec_service.bench.speed.report import build_report
from vidspec_service.bench.speed.run import measure_speed
from vidspec_service.engine.config import EngineConfig, WorkerConfig

PAIR = EngineConfig(
    target=WorkerConfig(model="bundled", dtype="float32"), draft=WorkerConfig(model="bundled", dtype="float32")
)


def test_a_message_goes_there_and_back() -> None:
    found = measure_round_trip(50)
    assert 0 < found["p50_s"] <= found["p99_s"]
    assert found["num_exchanges"] == 50


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_every_mode_is_timed_and_gives_the_same_ids(concurrency: int) -> None:
    temperature = 0.0 if concurrency == 1 else 0.8
    # Answers long enough that both workers run forwards while they are decoded.
    options = SpeedOptions(num_prompts=3, max_tokens=48, concurrency=concurrency, temperature=temperature, seed=3)
    told: list[str] = []
    measured = measure_speed(options, PAIR, lambda text, *_: told.append(text))
    report = build_report(options, PAIR, measured)
    found = report.figures
    assert found["identical"] is True
    assert found["identical_to_hf"] is (True if concurrency == 1 else None)
    assert all(result["tokens_per_s"] > 0 for result in found["modes"].values())
    assert set(found["modes"][Mode.PARALLEL]["workers"]) == {"target", "draft"}
    for use in found["modes"][Mode.PARALLEL]["workers"].values():
        assert use["forwards"]["num_forwards"] > 0
    assert found["cost_ratio"] is not None
    assert json.loads(report.to_json())["prompts"] == 3
    assert "timing forwards" in told
