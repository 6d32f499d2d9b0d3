"""The timeline: display order, trimmed and missing timestamps, and where decoding may start."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.decoding.reader.timeline import EntryPoint, PacketFacts, Timeline, build_timeline

pytestmark = pytest.mark.unit

MS = Fraction(1, 1000)


def packet(
    pts: int | None, *, key: bool = False, discard: bool = False, dts: int | None = None, duration: int = 0
) -> PacketFacts:
    return PacketFacts(pts, dts, duration, key, discard)


def timeline_of(
    *packets: PacketFacts, rate: Fraction | None = None, trust_pts: bool = True, base: Fraction = MS
) -> Timeline:
    timeline = build_timeline(packets, base, rate, trust_pts=trust_pts)
    assert timeline is not None
    return timeline


def test_reordered_packets_come_out_in_display_order_from_zero() -> None:
    timeline = timeline_of(packet(500, key=True), packet(540), packet(520), packet(560, duration=20))
    assert timeline.timestamps_s() == [0.0, 0.02, 0.04, 0.06]
    assert timeline.duration_s == 0.08


def test_seconds_are_the_exact_rational_rounded_once() -> None:
    base = Fraction(1001, 30000)
    timeline = timeline_of(packet(0, key=True), *(packet(i) for i in range(1, 1000)), base=base)
    assert timeline.timestamps_s() == [float(i * base) for i in range(1000)]


def test_packets_that_an_edit_list_trims_are_not_frames() -> None:
    trimmed = packet(-40, key=True, discard=True), packet(-20, discard=True)
    timeline = timeline_of(*trimmed, packet(0), packet(20), packet(40, discard=True))
    assert timeline.timestamps_s() == [0.0, 0.02]
    assert timeline.entry_point(1) == EntryPoint(0, 0)  # but decoding needs those packets


def test_frames_before_the_first_keyframe_are_not_promised() -> None:
    timeline = timeline_of(packet(0), packet(50), packet(40, key=True), packet(60))
    assert timeline.timestamps_s() == [0.0, 0.02]
    assert timeline.entry_point(0) == EntryPoint(2, 0)


def test_frames_that_show_before_the_first_keyframe_are_not_promised() -> None:
    """They need the keyframe before, which was cut off."""
    timeline = timeline_of(packet(100, key=True), packet(60), packet(80), packet(140), packet(120))
    assert timeline.timestamps_s() == [0.0, 0.02, 0.04]


def test_without_any_keyframe_all_is_decoded_from_the_start() -> None:
    timeline = timeline_of(packet(0), packet(20), packet(40))
    assert timeline.timestamps_s() == [0.0, 0.02, 0.04]
    assert timeline.entry_point(2) == EntryPoint(0, 0)


def test_decoding_starts_at_the_last_keyframe_before_the_frame() -> None:
    timeline = timeline_of(packet(0, key=True), packet(20), packet(40, key=True), packet(60))
    assert [timeline.entry_point(i) for i in range(4)] == [(0, 0), (0, 0), (2, 2), (2, 2)]


def test_a_leading_frame_of_an_open_gop_needs_the_keyframe_before() -> None:
    # Stored: I0 P40 | I100 B60 B80 P140; 60 and 80 are shown before the second I but stored after it.
    timeline = timeline_of(packet(0, key=True), packet(40), packet(100, key=True), packet(60), packet(80), packet(140))
    assert timeline.entry_point(timeline.index_at(60)) == EntryPoint(0, 0)
    assert timeline.entry_point(timeline.index_at(140)) == EntryPoint(2, 4)


def test_the_last_frame_lasts_as_long_as_the_average_where_the_file_does_not_say() -> None:
    assert timeline_of(packet(0, key=True), packet(30), packet(100)).duration_s == 0.15
    assert timeline_of(packet(0, key=True), packet(30)).duration_s == 0.06


def test_a_lone_frame_lasts_what_the_rate_says() -> None:
    assert timeline_of(packet(7, key=True), rate=Fraction(10)).duration_s == 0.1
    assert timeline_of(packet(7, key=True)).duration_s > 0


def test_repeated_times_are_one_frame() -> None:
    assert timeline_of(packet(0, key=True), packet(20), packet(20)).timestamps_s() == [0.0, 0.02]


def test_without_display_times_frames_are_counted_in_decode_order() -> None:
    packets = [packet(None, key=i == 0, dts=40 * i, duration=40) for i in range(3)]
    timeline = timeline_of(*packets)
    assert timeline.is_counted
    assert timeline.timestamps_s() == [0.0, 0.04, 0.08]
    assert timeline.entry_point(2) == EntryPoint(0, 0)


def test_without_any_times_the_stated_rate_serves() -> None:
    timeline = timeline_of(*(packet(None) for _ in range(4)), rate=Fraction(2))
    assert timeline.timestamps_s() == [0.0, 0.5, 1.0, 1.5]
    assert timeline.duration_s == 2.0
    assert timeline_of(packet(None, dts=0), packet(None), rate=Fraction(2)).timestamps_s() == [0.0, 0.5]


def test_display_times_are_used_unless_most_frames_have_none() -> None:
    known, unknown = packet(0, key=True, dts=0), [packet(None, dts=20), packet(None, dts=40)]
    assert timeline_of(known, *unknown[:1]).timestamps_s() == [0.0]
    assert timeline_of(known, *unknown).timestamps_s() == [0.0, 0.02, 0.04]


def test_untrusted_display_times_are_not_used() -> None:
    timeline = timeline_of(packet(9, key=True, dts=0), packet(3, dts=1), trust_pts=False)
    assert timeline.is_counted
    assert timeline.timestamps_s() == [0.0, 0.001]


@pytest.mark.parametrize("packets", [[], [packet(0, key=True, discard=True)]])
def test_nothing_to_show_is_no_timeline(packets: list[PacketFacts]) -> None:
    assert build_timeline(packets, MS, None, trust_pts=True) is None


def test_which_frame_is_on_display() -> None:
    timeline = timeline_of(packet(100, key=True), packet(140))
    assert [timeline.index_at(tick) for tick in (99, 100, 139, 140, 999)] == [-1, 0, 0, 1, 1]


@given(
    keyframe_gaps=st.lists(st.integers(1, 120), min_size=1, max_size=12),
    count=st.integers(1, 5),
    data=st.data(),
)
def test_shares_hold_every_place_once_and_what_one_keyframe_begins_stays_together(
    keyframe_gaps: list[int], count: int, data: st.DataObject
) -> None:
    keyframes = list(accumulate([0, *keyframe_gaps[:-1]]))
    num_frames = sum(keyframe_gaps)
    clip = timeline_of(*(packet(at, key=at in keyframes) for at in range(num_frames)))
    chosen = sorted(data.draw(st.sets(st.integers(0, num_frames - 1), min_size=1)))
    shares = clip.shares(chosen, count)
    assert len(shares) == count
    assert sorted(place for share in shares for place in share) == list(range(len(chosen)))
    assert all(list(share) == sorted(share) for share in shares)
    pieces = {(clip.entry_point(chosen[place]).packet, number) for number, each in enumerate(shares) for place in each}
    assert len(pieces) == len({entry for entry, _ in pieces})


def test_shares_take_about_as_long() -> None:
    """No split of a minute's 8 frames into neighbours is even: the first six take a third longer than the last two."""
    clip = timeline_of(*(packet(at, key=at % 250 == 0) for at in range(1800)))
    shares = clip.shares([112, 337, 562, 787, 1012, 1237, 1462, 1687], 2)
    works = {0: 112, 1: 87, 2: 62, 3: 37, 4: 12, 5: 225, 6: 212, 7: 187}  # packets since the last frame or keyframe
    totals = [sum(map(works.__getitem__, share)) for share in shares]
    assert max(totals) <= 1.15 * min(totals)
