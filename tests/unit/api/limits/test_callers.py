"""Callers: which header identifies a caller, and a separate limit of requests per minute for each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.api.limits.callers import ApiKeys, RateLimit

KEYS = ("first-key-0123456789", "second-key-0123456789")


def test_each_key_has_a_name_of_its_own_that_does_not_contain_it() -> None:
    keys = ApiKeys(KEYS)
    names = [keys.caller(f"Bearer {key}") for key in KEYS]
    assert None not in names
    assert len(set(names)) == 2
    assert not [name for name in names for key in KEYS if name is None or key[:4] in name]


def test_a_name_is_the_same_after_a_restart_and_in_any_order() -> None:
    header = f"Bearer {KEYS[0]}"
    assert ApiKeys(KEYS).caller(header) == ApiKeys(reversed(KEYS)).caller(header)


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", KEYS[0], f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", f"Bearer {KEYS[0][:-1]}",
     f"Bearer {KEYS[0]},{KEYS[1]}", f"Bearer {KEYS[0].upper()}", "Bearer \xff\xfe"],
)  # fmt: skip
def test_anything_else_names_nobody(header: str) -> None:
    assert ApiKeys(KEYS).caller(header) is None


@given(st.text(max_size=40))
def test_no_header_is_an_accident(header: str) -> None:
    assert ApiKeys(KEYS).caller(header) is None


@pytest.mark.parametrize("header", [f"bearer {KEYS[1]}", f"Bearer   {KEYS[1]} "])
def test_the_scheme_is_read_as_http_says(header: str) -> None:
    assert ApiKeys(KEYS).caller(header) == ApiKeys(KEYS).caller(f"Bearer {KEYS[1]}")


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
