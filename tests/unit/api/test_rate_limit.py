"""So many requests a minute, for each caller by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.api.rate_limit import RateLimit

pytestmark = pytest.mark.unit


def test_without_a_limit_anything_goes() -> None:
    limit = RateLimit(None, lambda: 0.0)
    assert [limit.take("a") for _ in range(1000)] == [0.0] * 1000


def test_a_quiet_caller_may_send_a_minutes_worth_at_once_and_is_then_told_when_to_come_back() -> None:
    now = 100.0
    limit = RateLimit(30, lambda: now)
    assert [limit.take("a") for _ in range(30)] == [0.0] * 30
    assert limit.take("a") == pytest.approx(2.0)
    assert limit.take("b") == 0.0
    now += 1.5
    assert limit.take("a") == pytest.approx(0.5)
    now += 0.5
    assert limit.take("a") == 0.0


@given(st.integers(1, 50), st.lists(st.floats(0, 20), max_size=100))
def test_no_stretch_of_time_sees_more_than_the_bucket_and_what_flowed_in(per_minute: int, gaps: list[float]) -> None:
    now = 0.0
    limit = RateLimit(per_minute, lambda: now)
    passed = []
    for gap in gaps:
        now += gap
        if limit.take("a") == 0.0:
            passed.append(now)
    for first, begin in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= per_minute + (passed[last] - begin) * per_minute / 60 + 1e-6


@given(st.integers(1, 600))
def test_whoever_waits_as_long_as_told_may_go_on(per_minute: int) -> None:
    now = 0.0
    limit = RateLimit(per_minute, lambda: now)
    while (wait_s := limit.take("a")) == 0.0:
        pass
    now += wait_s + 1e-9
    assert limit.take("a") == 0.0
