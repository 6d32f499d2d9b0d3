"""Random models through the real engine: every mode gives the target's ids, at the requested acceptance rate."""

from __future__ import annotations

import gc
import json
import math
import weakref

import pytest
import torch

from vidspec_models.loading import load_model as loading
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.reference import measure
from vidspec_models.video_lm import VideoLM
from vidspec_service.bench.speed.costs import time_forwards
from vidspec_service.bench.speed.options import Mode, SpeedOptions
from vidspec_service.bench.speed.report import speed_report
from vidspec_service.bench.speed.run import measure_speed
from vidspec_service.engine.config import EngineConfig, WorkerConfig

PAIR = EngineConfig(
    target=WorkerConfig(model="shape of a target", device="cpu", dtype="float32"),
    draft=WorkerConfig(model="shape of a draft", device="cpu", dtype="float32"),
    stream_interval_s=0.0,  # a token at a time: a target as small as this would else answer before the draft begins
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_acceptance_is_imposed_and_changes_no_id() -> None:
    options = SpeedOptions(
        num_prompts=2,
        is_synthetic=True,
        modes=(Mode.HF, Mode.OFF, Mode.SERIAL, Mode.PARALLEL),
        max_tokens=300,
        shape="tiny",
        acceptance=0.7,
    )
    measured = measure_speed(options, PAIR, lambda *_: None)
    report = speed_report(options, PAIR, measured)
    found = report.figures
    assert found["identical"] is True
    assert found["identical_to_hf"] is True
    assert found["modes"][Mode.SERIAL]["num_tokens"] == 600
    stats = [sample.speculation for mode in (Mode.SERIAL, Mode.PARALLEL) for sample in measured.of(mode)]
    num_judged = sum(each.num_draft_tokens for each in stats)  # fewer where the machine is busy and the draft late
    assert num_judged
    deviation = math.sqrt(num_judged * 0.7 * (1 - 0.7))
    assert sum(each.num_accepted_tokens for each in stats) == pytest.approx(num_judged * 0.7, abs=4 * deviation)
    assert set(found["synthetic"]["rooflines"]) == {"target", "draft"}
    assert set(found["costs"].target.seconds) == {1, 2, 4, 9, 17}
    assert json.loads(report.to_json())["synthetic"]["acceptance"] == 0.7
    assert found["models"]["target"]["model"] == "shape of a target"


def test_a_model_has_left_its_device_when_copies_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    load, loaded = loading.load_model, list["weakref.ref[VideoLM]"]()

    def remembered(spec: ModelSpec) -> VideoLM:
        model = load(spec)
        loaded.append(weakref.ref(model))
        held: list[object] = [model]
        held.append(held)  # as frames are held in which a kernel was compiled
        return model

    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # it would change this process, too
    monkeypatch.setattr(loading, "load_model", remembered)
    monkeypatch.setattr(measure, "time_copies", lambda _: 1.0 if loaded[0]() is None else 0.0)
    spec = ModelSpec(path="bundled", role="draft", device="cpu", dtype="float32")
    gc.disable()  # when it would run by itself is luck
    try:
        assert time_forwards(spec, 1, 100, (1,), with_copies=True).bandwidth == 1.0
    finally:
        gc.enable()
