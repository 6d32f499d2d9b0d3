"""Confidence intervals resample groups, not the items counted in them."""

from __future__ import annotations

import pytest

from vidspec_service.bench.common.bootstrap import Estimate, difference, estimate, rate, ratio, whiskers


def test_an_interval_is_about_groups_not_about_what_is_counted_in_them() -> None:
    found = estimate(rate, [(10, 10), (0, 10)])
    assert (found.value, found.interval) == (0.5, (0.0, 1.0))


def test_one_group_has_no_interval_and_none_no_figure() -> None:
    assert estimate(rate, [(1, 4)]) == Estimate(value=0.25, interval=None)
    assert estimate(rate, []) == Estimate(value=None, interval=None)


def test_what_is_not_finite_is_no_figure() -> None:
    assert estimate(rate, [(0, 0), (0, 0)]) == estimate(ratio, [(1, 1, 0, 1)] * 2) == estimate(rate, [])


def test_what_is_the_same_in_every_group_has_no_spread() -> None:
    groups = [(10, 10, 10, 10), (0, 10, 0, 10)]
    assert estimate(difference, groups).interval == (0.0, 0.0)
    assert estimate(ratio, [(4.0, 1.0, 1.0, 1.0)] * 8).interval == pytest.approx((4.0, 4.0))


def test_the_interval_holds_the_figure_and_is_the_same_every_time() -> None:
    groups = [(100, 0.2 + 0.02 * index, 100, 1.0) for index in range(12)]
    found = estimate(ratio, groups)
    assert found.interval is not None
    assert found.value is not None
    assert found.interval[0] < found.value < found.interval[1]
    assert found.value == pytest.approx(12 / sum(seconds for _, seconds, *_ in groups))
    assert found == estimate(ratio, groups)


def test_resamples_without_a_figure_do_not_count() -> None:
    found = estimate(ratio, [(1, 1, 1, 1), (1, 1, 0, 1)])
    assert found.interval is not None
    assert (found.value, found.interval[0]) == (2.0, 1.0)
    assert found.interval[1] < float("inf")


def test_the_interval_of_many_groups_is_that_of_a_normal_distribution_at_95_percent() -> None:
    half = 1.96 * (0.25 / 2000) ** 0.5
    interval = estimate(rate, [(index % 2, 1) for index in range(2000)]).interval
    assert interval == pytest.approx((0.5 - half, 0.5 + half), abs=0.0012)


def test_whiskers_reach_from_the_figure_to_both_ends_of_its_interval_and_never_inwards() -> None:
    assert whiskers(2.0, (1.5, 3.0)) == (0.5, 1.0)
    assert whiskers(2.0, (2.5, 3.0)) == (0.0, 1.0)
    assert whiskers(2.0, (1.0, 1.5)) == (1.0, 0.0)
    assert whiskers(2.0, None) == (0.0, 0.0)
