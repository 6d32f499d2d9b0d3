"""Two engines count as equal only if the same request gives the same bits on both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes import INFO
from vidspec_models.step_path import COMPILED, COMPILED_INT8, StepPath
from vidspec_service.cluster import engine_replica
from vidspec_service.cluster.engine_replica import numerics_fingerprint
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.frontend.interface import EngineInfo, EngineStatus, WorkerState
from vidspec_service.engine.kv_budget import DeviceMemory, WorkerMemory

CONFIG = EngineConfig(target=WorkerConfig(model="bundled"), draft=WorkerConfig(model="bundled"))


def with_threads(number: int | None, prefill_chunk: int | None = None) -> EngineConfig:
    return replace(CONFIG, target=WorkerConfig(model="bundled", threads=number), prefill_chunk=prefill_chunk)


def with_memory(device: str, total: int, free: int = 10) -> EngineInfo:
    memory = DeviceMemory(device=device, total=total, free=free, weights=1, activations=1, token_bytes=1)
    return replace(INFO, memory={"target": WorkerMemory(context=9, measured_at=0.0, devices=(memory,))})


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


@pytest.mark.parametrize(("one", "other"), [(3, 4), (3, None)])
def test_the_number_of_cores_counts_where_it_decides_the_chunks(
    monkeypatch: pytest.MonkeyPatch, one: int, other: int | None
) -> None:
    def of(threads: int | None, prefill_chunk: int | None = None) -> str:
        return numerics_fingerprint(with_threads(threads, prefill_chunk), INFO, status())

    monkeypatch.setattr(engine_replica, "num_cores", lambda: 5)
    assert of(one) != of(other)
    assert of(one, 64) == of(other, 64)
    assert of(None) == of(5)


def test_a_machine_with_more_memory_is_the_same_engine() -> None:
    assert numerics_fingerprint(CONFIG, with_memory("cpu", 80), status()) == numerics_fingerprint(
        CONFIG, with_memory("cpu", 96), status()
    )


def test_another_kind_of_gpu_is_another_engine_however_much_of_it_is_free() -> None:
    here, fuller, other = (
        numerics_fingerprint(CONFIG, with_memory("cuda:0", total, free), status())
        for total, free in ((80, 10), (80, 5), (96, 10))
    )
    assert here == fuller != other


def test_another_processor_is_another_engine_however_fast_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def on(model: int, mhz: float) -> str:
        (tmp_path / "cpuinfo").write_text(
            f"processor\t: 0\nmodel\t\t: {model}\ncpu MHz\t\t: {mhz}\n\nprocessor\t: 1\nmodel\t\t: 1\n\n"
        )
        return numerics_fingerprint(CONFIG, INFO, status())

    monkeypatch.setattr(engine_replica, "_PROCESSOR", tmp_path / "cpuinfo")
    assert on(68, 2450.0) == on(68, 3100.0) != on(1, 2450.0)
