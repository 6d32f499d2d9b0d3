"""How many prompt rows are prefilled between two decoding steps of the streams."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vidspec_service.engine.config import EngineConfig, WorkerConfig, prefill_rows

CONFIG = EngineConfig(target=WorkerConfig(model="bundled"))


@pytest.mark.parametrize(
    ("device", "threads", "num_rows"),
    [("cpu", 1, 128), ("cpu", 2, 128), ("cpu", 6, 384), ("cpu", 64, 512), ("cuda", 1, 512)],
)
def test_a_cpu_has_as_many_as_keep_its_threads_at_work(device: str, threads: int, num_rows: int) -> None:
    assert prefill_rows(CONFIG, device, threads) == num_rows


def test_what_the_operator_says_holds_everywhere() -> None:
    assert {prefill_rows(replace(CONFIG, prefill_chunk=7), device, 4) for device in ("cpu", "cuda")} == {7}
