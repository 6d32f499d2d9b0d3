"""A complete comparison on the bundled pair and the channel round trip, with real processes."""

from __future__ import annotations

import json

import pytest

from vidspec_models.loading.spec import ModelSpec
from vidspec_service.bench.common.child import Child
from vidspec_service.bench.speed.costs import BusyDraft, measure_round_trip
from vidspec_service.bench.speed.options import Mode, SpeedOptions
from vidspec_service.bench.speed.report import speed_report
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
def test_a_draft_that_is_kept_busy_ends_in_peace(capfd: pytest.CaptureFixture[str]) -> None:
    """A thread torn out of a kernel while its process ended aborted the process in two of five cases."""
    for _ in range(3):
        with Child(BusyDraft, ModelSpec(path="bundled", role="draft"), 1, 500) as busy:
            assert busy.call(BusyDraft.is_at_work)
    assert "terminate called" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_every_mode_is_timed_and_gives_the_same_ids(concurrency: int) -> None:
    temperature = 0.0 if concurrency == 1 else 0.8
    # Answers long enough that both workers run forwards while they are decoded.
    options = SpeedOptions(num_prompts=3, max_tokens=48, concurrency=concurrency, temperature=temperature, seed=3)
    told: list[str] = []
    measured = measure_speed(options, PAIR, lambda text, *_: told.append(text))
    report = speed_report(options, PAIR, measured)
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
