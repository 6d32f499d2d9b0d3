"""A whole run on the bundled target, each configuration in its own process."""

from __future__ import annotations

import pytest

from vidspec_models.loading.spec import ModelSpec
from vidspec_service.bench.compression.options import CompressionOptions, Method
from vidspec_service.bench.compression.report import results
from vidspec_service.bench.compression.run import measure_compression
from vidspec_service.errors import ConfigError


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compressed_targets_hold_and_read_less_and_all_are_scored_alike() -> None:
    methods = (Method.TTM, Method.DYCOKE, Method.V_CAST)
    options = CompressionOptions(num_clips=2, frames=(8,), ratios=(0.5,), methods=methods, max_tokens=24)
    told: list[tuple[str, int, int]] = []
    measured, placement = measure_compression(
        options,
        ModelSpec(path="bundled", role="target", dtype="float32"),
        1,
        lambda text, done, total: told.append((text, done, total)),
    )
    none, ttm, dycoke, v_cast = results(measured)
    assert placement.dtype == "float32"
    assert none["video_tokens"] == 8 * 64 + 1
    assert ttm["video_tokens"] == dycoke["video_tokens"] == 2 * (64 + 3 * 21) + 1
    assert v_cast["video_tokens"] == 8 * 32 + 1
    assert none["kv_bytes"] > ttm["kv_bytes"] > dycoke["kv_attended_bytes"]
    assert none["kv_attended_bytes"] == none["kv_bytes"]
    assert none["num_scored"] == ttm["num_scored"] == dycoke["num_scored"] == v_cast["num_scored"] > 50
    assert min(line["prefill_s"] for line in (none, ttm, dycoke, v_cast)) > 0
    assert [done for _, done, _ in told] == list(range(16))
    assert {total for *_, total in told} == {16}


@pytest.mark.slow
def test_a_model_that_is_not_there_is_a_clear_error() -> None:
    options = CompressionOptions(num_clips=1, frames=(8,), ratios=(0.5,))
    with pytest.raises(ConfigError, match="/no/such/model"):
        measure_compression(options, ModelSpec(path="/no/such/model", role="target"), 1, lambda *_: None)
