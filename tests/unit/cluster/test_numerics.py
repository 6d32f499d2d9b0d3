"""Two engines count as equal only if the same request gives the same bits on both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes import INFO
from vidspec_models.step_path import COMPILED, COMPILED_INT8, StepPath
from vidspec_service.cluster.engine_replica import numerics_fingerprint
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.frontend.interface import EngineInfo, EngineStatus, WorkerState

CONFIG = EngineConfig(target=WorkerConfig(model="bundled"), draft=WorkerConfig(model="bundled"))


def status(path: StepPath = COMPILED) -> EngineStatus:
    return EngineStatus(
        workers={"target": WorkerState.READY}, num_running=0, num_waiting=0, step_paths={"target": path}
    )


def test_what_changes_speed_only_is_no_difference() -> None:
    other = replace(CONFIG, draft=None, prune_ratio=0.5, max_running_requests=3)
    assert numerics_fingerprint(other, replace(INFO, draft_model=None), status()) == numerics_fingerprint(
        CONFIG, INFO, status()
    )


@pytest.mark.parametrize(
    ("config", "info", "path"),
    [
        (replace(CONFIG, target=WorkerConfig(model="/models/other")), INFO, COMPILED),
        (replace(CONFIG, target=WorkerConfig(model="bundled", revision="2")), INFO, COMPILED),
        (replace(CONFIG, prefill_chunk=64), INFO, COMPILED),
        (CONFIG, replace(INFO, devices={"target": "cpu bfloat16"}), COMPILED),
        (CONFIG, replace(INFO, versions={"torch": "2.16"}), COMPILED),
        (CONFIG, INFO, COMPILED_INT8),
    ],
    ids=["model", "revision", "chunks", "dtype", "library", "kernels"],
)
def test_whatever_may_change_a_bit_is_one(config: EngineConfig, info: EngineInfo, path: StepPath) -> None:
    assert numerics_fingerprint(config, info, status(path)) != numerics_fingerprint(CONFIG, INFO, status())


def test_another_processor_is_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = numerics_fingerprint(CONFIG, INFO, status())
    monkeypatch.setattr("vidspec_service.cluster.engine_replica._processor", lambda: ["another"])
    assert numerics_fingerprint(CONFIG, INFO, status()) != here
