"""The picker: chosen frames once and in order, and neighbours for those that never come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.decoding.frame_picker import FramePicker

pytestmark = pytest.mark.unit


def pick(chosen: list[int], decoded: list[int]) -> tuple[list[int], FramePicker[str]]:
    picker = FramePicker[str](chosen)
    given_out = [pair for index in decoded for pair in picker.offer(index, f"frame {index}")]
    given_out += picker.finish()
    assert all(frame == f"frame {index}" for index, frame in given_out)
    return [index for index, _ in given_out], picker


def test_what_is_decoded_is_given_out_once() -> None:
    indices, picker = pick([1, 4, 5], list(range(10)))
    assert indices == [1, 4, 5]
    assert (picker.num_replaced, picker.num_lost, picker.next_wanted) == (0, 0, None)


def test_a_missing_frame_is_replaced_by_the_one_before() -> None:
    indices, picker = pick([1, 5], [0, 1, 2, 6, 7])
    assert indices == [1, 2]
    assert picker.num_replaced == 1


def test_one_frame_earlier_is_what_a_player_shows_and_no_damage() -> None:
    indices, picker = pick([5], [3, 4, 6])
    assert indices == [4]
    assert picker.num_replaced == 0


def test_the_one_after_stands_in_where_there_is_none_before() -> None:
    indices, picker = pick([0, 6], [2, 3, 6])
    assert indices == [2, 6]
    assert picker.num_replaced == 1


def test_a_frame_that_is_chosen_itself_stands_in_for_none() -> None:
    indices, picker = pick([2, 3], [0, 3])
    assert indices == [0, 3]
    indices, picker = pick([0, 3], [3])
    assert indices == [3]
    assert picker.num_lost == 1


def test_missing_at_the_end_is_replaced_or_lost() -> None:
    indices, picker = pick([2, 8, 9], [0, 1, 2, 3])
    assert indices == [2, 3]
    assert (picker.num_replaced, picker.num_lost) == (1, 1)


def test_after_a_jump_what_came_before_does_not_stand_in() -> None:
    picker = FramePicker[str]([50])
    assert list(picker.offer(1, "old")) == []
    picker.forget_previous()
    assert list(picker.offer(60, "new")) == [(60, "new")]


@given(st.sets(st.integers(0, 40), min_size=1), st.sets(st.integers(0, 40)))
def test_every_chosen_frame_is_accounted_for(chosen: set[int], decoded: set[int]) -> None:
    indices, picker = pick(sorted(chosen), sorted(decoded))
    assert indices == sorted(set(indices))
    assert set(indices) <= decoded
    assert chosen & decoded <= set(indices)
    assert len(indices) + picker.num_lost == len(chosen)
