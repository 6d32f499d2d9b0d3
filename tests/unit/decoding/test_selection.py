"""Frame selection: properties of every choice, expected choices in examples, and the frames of FramePicker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.decoding.clip import DecodingLimits, FrameRequest
from vidspec_service.decoding.selection import FramePicker, FrameSelection, select_frames, select_sequence
from vidspec_service.errors import InvalidRequest, ServiceError, VideoTooLarge

pytestmark = pytest.mark.unit

LIMITS = DecodingLimits(max_frames=40)
SLACK_S = 0.001  # a frame that begins at most this much after an instant counts as shown then


@st.composite
def clips(draw: st.DrawFn) -> tuple[list[float], float]:
    """Timestamps from 0 with any gaps between 1 ms and 2 s, and the end."""
    gaps = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=80))
    *starts, end = accumulate(gaps, initial=0)
    return [start / 1000 for start in starts], end / 1000


@st.composite
def requests(draw: st.DrawFn, duration_s: float) -> FrameRequest:
    """A valid request whose window begins inside the clip."""
    start_s = draw(st.none() | st.floats(0, duration_s * 0.99))
    end_s = draw(st.none() | st.floats((start_s or 0.0) + 1e-3, duration_s * 2 + 1))
    by_rate = draw(st.booleans())
    return FrameRequest(
        fps=draw(st.floats(0.01, 1000)) if by_rate else None,
        num_frames=None if by_rate else draw(st.none() | st.integers(1, LIMITS.max_frames)),
        max_frames=draw(st.none() | st.integers(1, 100)),
        start_s=start_s,
        end_s=end_s,
    )


def even(count: int, fps: float = 30.0) -> tuple[list[float], float]:
    return [i / fps for i in range(count)], count / fps


def select(clip: tuple[list[float], float], **fields: float) -> FrameSelection:
    return select_frames(*clip, FrameRequest(**fields), LIMITS, default_num_frames=8)  # type: ignore[arg-type]


@given(st.data(), clips())
def test_any_choice_is_sorted_unique_bounded_and_on_display_in_the_window(
    data: st.DataObject, clip: tuple[list[float], float]
) -> None:
    timestamps_s, duration_s = clip
    request = data.draw(requests(duration_s))
    indices = select_frames(timestamps_s, duration_s, request, LIMITS, default_num_frames=8).indices
    assert list(indices) == sorted(set(indices))
    most = min(LIMITS.max_frames, request.max_frames or LIMITS.max_frames, len(timestamps_s))
    if request.fps is None:
        most = min(most, request.num_frames or 8)
    assert 1 <= len(indices) <= most
    start_s, end_s = request.start_s or 0.0, min(request.end_s or duration_s, duration_s)
    for index in indices:
        leaves_s = [*timestamps_s, duration_s][index + 1]
        assert timestamps_s[index] < end_s + SLACK_S
        assert leaves_s > start_s - SLACK_S


@given(st.integers(1, LIMITS.max_frames), st.sampled_from([5.0, 12.0, 24000 / 1001, 25.0, 30.0, 60.0, 240.0]))
def test_asking_for_every_frame_gives_every_frame(count: int, fps: float) -> None:
    assert select(even(count, fps), num_frames=count).indices == tuple(range(count))
    assert select(even(count, fps), fps=fps, max_frames=count) == FrameSelection(indices=tuple(range(count)))


@given(st.integers(1, 300), st.integers(1, LIMITS.max_frames), st.sampled_from([5.0, 24000 / 1001, 30.0, 240.0]))
def test_an_even_clip_gives_as_many_frames_as_asked_or_all(count: int, num_frames: int, fps: float) -> None:
    selection = select(even(count, fps), num_frames=num_frames)
    assert len(selection.indices) == min(count, num_frames)
    assert bool(selection.warnings) == (count < num_frames)


@given(clips(), st.floats(0.01, 500))
def test_a_rate_finds_the_frames_that_stepping_through_time_finds(clip: tuple[list[float], float], fps: float) -> None:
    timestamps_s, duration_s = clip
    slack_s = min(SLACK_S, duration_s / len(timestamps_s) / 4)
    expected, tick = [], 0
    while tick / fps < duration_s:
        expected.append(max(i for i, t in enumerate(timestamps_s) if t <= tick / fps + slack_s))
        tick += 1
    wide = DecodingLimits(max_frames=1000)
    indices = select_frames(*clip, FrameRequest(fps=fps), wide, default_num_frames=8).indices
    assert indices == tuple(dict.fromkeys(expected))


def test_frames_are_the_ones_on_display_at_the_middles_of_equal_parts() -> None:
    assert select(even(100, 10.0), num_frames=4).indices == (12, 37, 62, 87)


def test_variable_rate_is_chosen_by_time_and_not_by_index() -> None:
    # Nine frames in the first 0.9 s, then one that stays for 9.1 s.
    clip = ([i / 10 for i in range(10)], 10.0)
    selection = select(clip, num_frames=5)
    assert selection.indices == (9,)
    assert "Only 1 distinct frames" in selection.warnings[0]


@given(clips(), st.integers(0, 9))
def test_of_a_clip_with_no_more_frames_than_asked_all_are_used(clip: tuple[list[float], float], more: int) -> None:
    """However long each of them stays."""
    timestamps_s, duration_s = clip[0][: LIMITS.max_frames - 9], clip[1]
    selection = select((timestamps_s, duration_s), num_frames=len(timestamps_s) + more)
    assert selection.indices == tuple(range(len(timestamps_s)))
    own = select_sequence([5.0, 6.0, 3599.0], 5396.0, FrameRequest(num_frames=3), LIMITS)
    assert own == FrameSelection(indices=(0, 1, 2))


def test_of_a_window_with_no_more_frames_than_asked_all_are_used() -> None:
    assert select(([0.0, 1.0, 1.1, 1.2, 5.0], 10.0), start_s=1.0, num_frames=4).indices == (1, 2, 3, 4)


def test_rounded_timestamps_at_their_own_rate_lose_no_frame() -> None:
    clip = ([round(i / 30, 3) for i in range(30)], 1.0)
    assert select(clip, fps=30.0).indices == tuple(range(30))


def test_a_window_is_clipped_to_the_clip_and_says_so() -> None:
    selection = select(even(100, 10.0), num_frames=2, start_s=8.0, end_s=99.0)
    assert selection.indices == (85, 95)
    assert selection.warnings == ("end_s is 99, but the clip lasts 10.000 s.",)
    assert select(even(100, 10.0), num_frames=2, end_s=10.0005).warnings == (), "as a player may say that it lasts"


@given(st.integers(0, 38), st.integers(1, 39), st.sampled_from([1, 2, 4, 5, 10, 1000]), st.sampled_from([3, 30, 40]))
def test_no_frame_begins_at_the_end_of_the_window_or_later(start: int, tenths: int, fps: float, count: int) -> None:
    times_s, duration_s = even(120)
    window = {"start_s": start / 10, "end_s": (start + tenths) / 10}
    for chosen in (
        select((times_s, duration_s), fps=fps, **window),
        select((times_s, duration_s), num_frames=count, **window),
    ):
        assert all(3 * index_of < start + tenths for index_of in (index / 9 for index in chosen.indices))


@pytest.mark.parametrize("fields", [{}, {"num_frames": 2}, {"fps": 30.0}])
def test_a_window_shorter_than_any_rounding_has_the_frame_on_display(fields: dict[str, float]) -> None:
    assert select(even(8, 10.0), start_s=0.2, end_s=0.2 + 1e-10, **fields).indices == (2,)


def test_fps_over_the_cap_spreads_the_cap_over_the_window() -> None:
    selection = select(even(300, 30.0), fps=10.0, max_frames=4)
    assert selection.indices == (37, 112, 187, 262)
    assert selection.warnings == ("fps=10 would need 100 frames; 4 evenly spread frames are used.",)


def test_max_frames_lowers_num_frames_and_says_so() -> None:
    selection = select(even(300), num_frames=30, max_frames=3)
    assert len(selection.indices) == 3
    assert selection.warnings == ("num_frames is lowered from 30 to max_frames, 3.",)


def test_neither_fps_nor_num_frames_means_the_default() -> None:
    assert len(select(even(300)).indices) == 8


@pytest.mark.parametrize(
    ("most", "indices", "told"), [(4, (0, 1, 2, 3), []), (2, (1, 3), ["2 evenly spread frames of 4"])]
)
def test_of_a_clients_own_frames_those_that_are_left_out_are_told(
    most: int, indices: tuple[int, ...], told: list[str]
) -> None:
    chosen = select_sequence((0.0, 1.0, 2.0, 3.0), 4.0, FrameRequest(max_frames=most), LIMITS)
    assert chosen.indices == indices
    assert [warning[: len("2 evenly spread frames of 4")] for warning in chosen.warnings] == told


def test_a_huge_rate_on_a_long_clip_is_answered_at_once() -> None:
    selection = select_frames(*even(2, 1 / 1800), FrameRequest(fps=1000.0), LIMITS, default_num_frames=8)
    assert selection.indices == (0, 1)


@pytest.mark.parametrize("start_s", [10.0, 11.0])
def test_a_start_past_the_end_is_refused_with_the_length(start_s: float) -> None:
    with pytest.raises(InvalidRequest, match=r"lasts 10\.000 s") as caught:
        select(even(100, 10.0), start_s=start_s)
    assert caught.value.param == "start_s"


def test_more_frames_than_the_server_allows_names_the_limit_and_the_setting() -> None:
    with pytest.raises(VideoTooLarge, match=r"num_frames is 41; the limit is 40 \(VIDSPEC_MAX_FRAMES\)") as caught:
        LIMITS.check_num_frames(41)
    assert isinstance(caught.value, ServiceError)
    assert caught.value.param == "num_frames"


def pick(chosen: list[int], decoded: Sequence[int]) -> tuple[list[int], FramePicker[str]]:
    picker = FramePicker[str](chosen)
    given_out = [pair for index in decoded for pair in picker.offer(index, f"frame {index}")]
    given_out += picker.finish()
    assert all(frame == f"frame {index}" for index, frame in given_out)
    return [index for index, _ in given_out], picker


@pytest.mark.parametrize(
    ("chosen", "decoded", "given", "num_replaced", "num_lost"),
    [
        ([1, 4, 5], range(10), [1, 4, 5], 0, 0),
        ([1, 5], [0, 1, 2, 6, 7], [1, 2], 1, 0),
        ([5], [3, 4, 6], [4], 0, 0),
        ([0, 6], [2, 3, 6], [2, 6], 1, 0),
        ([2, 3], [0, 3], [0, 3], 1, 0),
        ([0, 3], [3], [3], 0, 1),
        ([2, 8, 9], [0, 1, 2, 3], [2, 3], 1, 1),
    ],
    ids=[
        "what is decoded is given out once",
        "a missing frame is replaced by the one before",
        "one frame earlier is what a player shows and no damage",
        "the one after stands in where there is none before",
        "an earlier one stands in for one beside a chosen one",
        "a frame that is chosen itself stands in for none",
        "missing at the end is replaced or lost",
    ],
)
def test_frames_that_do_not_come_are_replaced_or_lost(
    chosen: list[int], decoded: Sequence[int], given: list[int], num_replaced: int, num_lost: int
) -> None:
    indices, picker = pick(chosen, decoded)
    assert indices == given
    assert (picker.num_replaced, picker.num_lost, picker.next_wanted) == (num_replaced, num_lost, None)


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
