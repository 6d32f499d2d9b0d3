"""Timestamp discontinuities: a file made of several recordings, each with a clock of its own, gets one timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import TypeAlias

from av.packet import Packet
from av.video.stream import VideoStream

VideoPacket: TypeAlias = "Packet[VideoStream]"

_MAX_BACK_S, _MAX_AHEAD_S = 0.1, 60.0  # from packet to packet; beyond, the clock has started anew


def continuous(
    packets: Iterable[VideoPacket], is_discontinuity: Callable[[VideoPacket], bool]
) -> Iterator[VideoPacket]:
    """Shift the times after each discontinuity: its first frame shows when the last one before it has been shown."""
    shift, step = 0, 1
    last = last_duration = 0  # of the frame that shows last, so far
    before: int | None = None
    for packet in packets:
        start = packet.dts if packet.pts is None else packet.pts
        if start is not None:
            if is_discontinuity(packet):
                shift = last + (last_duration or step) - start
            elif packet.dts is not None and before is not None:
                step = max(packet.dts - before, 1)
            if start + shift >= last:
                last, last_duration = start + shift, packet.duration or 0
        if packet.dts is not None:
            before = packet.dts
            packet.dts += shift
        if packet.pts is not None:
            packet.pts += shift
        yield packet


def clock_jumps(time_base: Fraction) -> Callable[[VideoPacket], bool]:
    """For streams that are joined by appending files (MPEG-TS and PS), where the clock may start anew anywhere.

    FFmpeg takes a clock that goes back by a minute for one that has run over, and lets it jump ahead by a day.
    """
    before: int | None = None

    def is_discontinuity(packet: VideoPacket) -> bool:
        nonlocal before
        if packet.dts is None:
            return False
        gap_s = 0 if before is None else (packet.dts - before) * time_base
        before = packet.dts
        return not -_MAX_BACK_S <= gap_s <= _MAX_AHEAD_S

    return is_discontinuity


def keyframe_goes_back() -> Callable[[VideoPacket], bool]:
    """For containers where FFmpeg reads on into a file that was appended (Matroska, Ogg): its clock begins at zero."""
    latest: int | None = None

    def is_discontinuity(packet: VideoPacket) -> bool:
        nonlocal latest
        if packet.pts is None or not packet.is_keyframe:
            return False
        before, latest = latest, packet.pts
        return before is not None and packet.pts <= before

    return is_discontinuity
