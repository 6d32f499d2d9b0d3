"""Load figures for handmade outcomes; arrival times against their distribution."""

from __future__ import annotations

import random
from itertools import islice, pairwise, takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.bench.common.report import Row
from vidspec_service.bench.serve.load import RequestOutcome, poisson_times
from vidspec_service.bench.serve.report import Objectives, load_result, percentiles


def whole(ttft_s: float = 0.5, e2e_s: float = 1.0, num_tokens: int = 11, **more: Any) -> RequestOutcome:
    return RequestOutcome(
        due_s=1.0, status=200, ttft_s=ttft_s, e2e_s=e2e_s, num_tokens=num_tokens, is_complete=True, **more
    )


def result(*outcomes: RequestOutcome, duration_s: float = 10.0, is_open: bool = True) -> Row:
    objectives = Objectives(ttft_s=1.0, tpot_s=0.1, deadline_s=5.0)
    return load_result("load", outcomes, duration_s, objectives, is_open=is_open)


def test_every_outcome_is_counted_once() -> None:
    found = result(
        whole(),
        whole(e2e_s=6.0, num_tokens=200),
        RequestOutcome(due_s=1, status=503, code="queue_full", e2e_s=0.02),
        RequestOutcome(due_s=1, status=429, code="rate_limited", e2e_s=0.04),
        RequestOutcome(due_s=1, status=200, code="deadline_exceeded", ttft_s=1.0, e2e_s=5.0),
        RequestOutcome(due_s=1, status=0, code="ReadError", e2e_s=0.1),
        RequestOutcome(due_s=1, status=500, code="internal_error", e2e_s=0.1),
        RequestOutcome(due_s=1, status=200, ttft_s=0.1, e2e_s=0.2),
        RequestOutcome(due_s=1, status=200, e2e_s=0.3, left_early=True),
        RequestOutcome(due_s=1, status=0, e2e_s=0.3, left_early=True),
    )
    counts = {"num_answered": 2, "num_refused": 2, "num_lost": 4, "num_left_early": 2, "num_late": 1}
    assert {name: found[name] for name in counts} == counts
    codes = ("503 queue_full", "429 rate_limited", "200 deadline_exceeded", "0 ReadError", "500 internal_error")
    assert found["errors"] == dict.fromkeys((*codes, "200 without an end"), 1)
    assert found["refusal"]["p50"] == pytest.approx(0.03)
    assert found["refusal"]["worst"] == 0.04
    assert (found["num_requests"], found["answered_per_s"], found["tokens_per_s"]) == (10, 0.2, 21.1)
    assert found["ttft"] == dict.fromkeys(("p50", "p90", "p95", "p99", "worst"), 0.5)
    assert (found["tpot"]["worst"], found["e2e"]["worst"]) == (0.05, 6.0)


def test_good_answers_meet_both_objectives() -> None:
    just_so, slow_start, slow_tokens = whole(1.0, 2.0), whole(1.1, 1.2), whole(0.1, 1.2)
    assert result(whole(), just_so, slow_start, slow_tokens)["goodput_per_s"] == 0.2
    assert result(whole(num_tokens=1, e2e_s=0.5))["goodput_per_s"] == 0.1  # a single token has no inter-token time


def test_an_open_load_is_offered_and_a_closed_one_is_not() -> None:
    assert result(whole(), whole())["offered_per_s"] == 2.0
    assert result(whole(), whole(), is_open=False)["offered_per_s"] is None
    assert result()["offered_per_s"] is None


def test_a_token_takes_the_time_after_the_first() -> None:
    assert whole(ttft_s=0.5, e2e_s=1.0, num_tokens=11).tpot_s == pytest.approx(0.05)
    assert whole(num_tokens=1).tpot_s is None


def test_nothing_has_no_percentiles() -> None:
    assert percentiles([]) is None
    assert (result()["ttft"], result()["goodput_per_s"]) == (None, 0.0)


@given(seed=st.integers(0, 2**32), rate=st.floats(0.1, 100))
def test_arrivals_are_in_order_and_repeatable(seed: int, rate: float) -> None:
    times = list(islice(poisson_times(rate, random.Random(seed)), 50))
    assert times == sorted(times)
    assert times == list(islice(poisson_times(rate, random.Random(seed)), 50))


def test_arrivals_have_the_rate_and_the_scatter_of_a_poisson_process() -> None:
    times = list(takewhile(lambda time: time < 2000.0, poisson_times(5.0, random.Random(0))))
    assert len(times) == pytest.approx(10_000, rel=0.05)
    gaps = [after - before for before, after in pairwise(times)]
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)  # e to the -1
