"""How many threads decode a single request."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from vidspec_models.backends.cpu.team_size import TeamSize

pytestmark = pytest.mark.unit

STRIDE_S = 0.004


def sizes_used(size: TeamSize, token_s: Mapping[int, float], seconds: float, began: float = 0.0) -> list[int]:
    """The team sizes of consecutive strides, if `size` threads take `token_s[size]` per token."""
    now, used = began, list[int]()
    while now < began + seconds:
        chosen = size.choose(now)
        now += STRIDE_S
        size.observe(chosen, token_s[chosen], now)
        used.append(chosen)
    return used


def test_each_is_tried_once_the_strides_are_warm_and_then_the_one_that_pays_is_used() -> None:
    used = sizes_used(TeamSize(1, 4), {1: 1.0, 2: 0.6, 4: 0.55}, seconds=0.1)
    assert used[:6] == [1, 1, 1, 1, 2, 4]
    assert set(used[6:]) == {2}  # four threads save less than a tenth


def test_what_cold_strides_take_counts_for_nothing() -> None:
    """Otherwise a size that once did not pay, and is tried right after a prompt, would never seem to pay again."""
    size, used = TeamSize(1, 2), list[int]()
    sizes_used(size, {1: 1.0, 2: 2.0}, seconds=0.5)
    for answer in range(20):
        began = 1.0 + 0.15 * answer
        for stride in range(10):
            now = began + stride * STRIDE_S
            chosen = size.choose(now)
            size.observe(chosen, {1: 1.0, 2: 0.6}[chosen] * (3.0 if stride < 3 else 1.0), now + STRIDE_S)
            used.append(chosen)
    assert used[10:].count(2) >= 0.9 * len(used[10:])


def test_the_largest_need_not_be_a_power_of_two() -> None:
    assert set(sizes_used(TeamSize(1, 6), {1: 1.0, 2: 0.6, 4: 0.4, 6: 0.2}, seconds=0.1)[8:]) == {6}


def test_one_that_becomes_slow_is_left_at_once_and_tried_again_later() -> None:
    size = TeamSize(1, 2)
    sizes_used(size, {1: 1.0, 2: 0.5}, seconds=0.2)
    crowded = sizes_used(size, {1: 1.2, 2: 8.0}, seconds=1.0, began=0.2)
    assert crowded[:2] == [2, 1]
    assert 2 <= crowded.count(2) <= 6
    assert set(sizes_used(size, {1: 1.0, 2: 0.5}, seconds=1.0, began=1.2)[-10:]) == {2}


def test_others_cost_little() -> None:
    used = sizes_used(TeamSize(1, 2), {1: 1.0, 2: 0.5}, seconds=4.0)
    assert used.count(1) <= 0.02 * len(used)


def test_a_single_size_is_no_choice() -> None:
    assert set(sizes_used(TeamSize(3, 3), {3: 1.0}, seconds=1.0)) == {3}
