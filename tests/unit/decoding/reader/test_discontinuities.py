"""A file made of several recordings: each keeps its own pace, and begins where the one before ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import cast

import pytest
from av.packet import Packet
from hypothesis import example, given
from hypothesis import strategies as st

from vidspec_service.decoding.reader.timeline import VideoPacket, clock_jumps, continuous, keyframe_goes_back

DETECTORS = {"clock": lambda: clock_jumps(Fraction(1, 1000)), "keyframe": keyframe_goes_back}
RECORDINGS = st.lists(st.tuples(st.integers(2, 20), st.sampled_from([20, 40, 50])), min_size=1, max_size=4)


def recorded(pts: int, *, is_keyframe: bool, duration: int) -> VideoPacket:
    packet = cast("VideoPacket", Packet(b"x"))
    packet.pts = packet.dts = pts
    packet.duration = duration
    packet.is_keyframe = is_keyframe
    return packet


@pytest.mark.parametrize("detector", DETECTORS.values(), ids=DETECTORS.keys())
@given(recordings=RECORDINGS, states_durations=st.booleans())
@example(recordings=[(2, 50), (2, 20), (2, 20)], states_durations=False)
def test_each_recording_begins_where_the_one_before_ended(
    detector: Callable[[], Callable[[VideoPacket], bool]],
    recordings: list[tuple[int, int]],
    states_durations: bool,
) -> None:
    def packets() -> Iterator[VideoPacket]:
        for count, step in recordings:
            for place in range(count):
                yield recorded(place * step, is_keyframe=place == 0, duration=step if states_durations else 0)

    if detector is DETECTORS["clock"] and any((count - 1) * step <= 100 for count, step in recordings):
        return  # so short a jump back is taken for disorder
    shown = [packet.pts for packet in continuous(packets(), detector())]
    expected, end = [], 0
    for count, step in recordings:
        expected += [end + place * step for place in range(count)]
        end += count * step
    assert shown == expected


def test_of_packets_that_state_one_time_or_are_reordered_each_recording_begins_where_the_last_ended() -> None:
    def packets() -> Iterator[VideoPacket]:
        for pts, dts in [(None, 0), (None, 100), (None, 200), (250, None), (220, None), (90, 50), (190, 150)]:
            packet = recorded(0, is_keyframe=True, duration=150)
            packet.pts, packet.dts = pts, dts
            yield packet

    found = [(packet.pts, packet.dts) for packet in continuous(packets(), DETECTORS["clock"]())]
    assert found == [(None, 0), (None, 100), (None, 200), (250, None), (220, None), (400, 360), (500, 460)]


def test_frames_that_are_shown_in_another_order_than_stored_are_no_new_recording() -> None:
    shown = [0, 120, 40, 80, 240, 160, 200]
    packets = (recorded(pts, is_keyframe=pts == 0, duration=40) for pts in shown)
    assert [packet.pts for packet in continuous(packets, keyframe_goes_back())] == shown
