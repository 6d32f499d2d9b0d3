"""Load tests of a real server on the bundled pair: every answer is complete, and a soak leaves nothing behind."""

from __future__ import annotations

import pytest

from vidspec_service.bench.common.report import Report
from vidspec_service.bench.serve.run import ServeOptions, measure_serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def load(options: ServeOptions, *flags: str) -> Report:
    return measure_serving(options, list(flags), None, lambda *_: None)


def test_an_open_load_is_answered_whole() -> None:
    report = load(ServeOptions(num_requests=4, rate=4.0, num_clips=2, max_tokens=6))
    (result,) = report.figures["loads"]
    assert (result["num_answered"], result["num_lost"], result["num_refused"]) == (4, 0, 0)
    assert result["ttft"] is not None
    assert report.figures["model"] == "vidspec-bundled"


def test_an_overload_is_answered_or_refused_and_nothing_is_lost() -> None:
    options = ServeOptions(num_requests=4, concurrency=2, overload=10.0, duration_s=5.0, num_clips=2, max_tokens=6)
    report = load(options, "--max-running-requests", "2", "--max-queued-requests", "1")
    _, overload = report.figures["loads"]
    assert overload["num_refused"] > 0
    assert overload["num_answered"] > 0
    assert (overload["num_lost"], overload["num_late"]) == (0, 0)
    assert set(overload["errors"]) <= {"503 queue_full"}


def test_a_soak_leaves_no_file_and_no_process() -> None:
    options = ServeOptions(soak=60, concurrency=8, num_clips=3, max_tokens=12)
    report = load(options, "--max-cached-frame-bytes", "0")
    assert report.figures["loads"][0]["num_left_early"] > 5
    assert report.failure is None  # no request was lost, no file or process is left
    soaked = report.figures["soak"]
    assert soaked["after"]["num_descriptors"] <= soaked["before"]["num_descriptors"] + 8
