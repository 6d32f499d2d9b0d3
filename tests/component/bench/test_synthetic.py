"""Random models through the real engine: every mode gives the target's ids, at the acceptance that was asked for."""

from __future__ import annotations

import json

import pytest

from vidspec_service.bench.options import Mode, SpeedOptions, SyntheticOptions, Task
from vidspec_service.bench.speed import build_report
from vidspec_service.bench.synthetic import measure_synthetic
from vidspec_service.engine.types import EngineConfig, WorkerConfig

PAIR = EngineConfig(
    target=WorkerConfig(model="shape of a target", device="cpu", dtype="float32"),
    draft=WorkerConfig(model="shape of a draft", device="cpu", dtype="float32"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_acceptance_is_imposed_and_changes_no_id() -> None:
    asked = SyntheticOptions(shape="tiny", acceptance=0.7)
    options = SpeedOptions(
        num_prompts=2,
        task=Task.SYNTHETIC,
        modes=(Mode.HF, Mode.OFF, Mode.SERIAL, Mode.PARALLEL),
        max_tokens=300,
        synthetic=asked,
    )
    measured = measure_synthetic(options, PAIR, asked, lambda *_: None)
    report = build_report(options, PAIR, measured, "test")
    assert report.identical is True
    assert report.identical_to_hf is True
    serial = report.modes[Mode.SERIAL]
    assert serial.num_tokens == 600
    assert serial.acceptance_rate == pytest.approx(0.7, abs=0.12)
    assert report.synthetic is not None
    assert set(report.synthetic.rooflines) == {"target", "draft"}
    assert set(report.costs.target.seconds) == {1, 2, 4, 9, 17}
    assert json.loads(report.to_json())["synthetic"]["acceptance"] == 0.7
    assert report.models["target"].model == "shape of a target"
