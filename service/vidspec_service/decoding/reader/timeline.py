"""A clip's timeline, from its packets alone: which frames exist, when each shows, where decoding can start.

A file made of several recordings, each with a clock of its own, gets one timeline. Pure; knows no file and no decoder.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.stream import VideoStream

VideoPacket: TypeAlias = "Packet[VideoStream]"

# Packets that a decoder may hold back before a frame comes out; codecs with the most keep 16 pictures.
_MAX_DELAY = 16
# A keyframe's work, in packets: as long as some twenty others (H.264 of 720p, without frames that nobody refers to).
_ENTRY_WORK = 20
# Only for a lone frame in a file that states neither a duration nor a rate.
_NOMINAL_FRAME = Fraction(1, 25)
_MAX_BACK_S, _MAX_AHEAD_S = 0.1, 60.0  # from packet to packet; beyond, the clock has started anew


class PacketFacts(NamedTuple):
    """One packet of the video stream, in file order; times in ticks of the stream's time base."""

    pts: int | None
    dts: int | None
    duration: int
    is_keyframe: bool
    is_discard: bool  # needed for decoding, never shown (edit lists)


class EntryPoint(NamedTuple):
    """Decoding may start at `packet`; frames that come out before display index `first_frame` are garbage."""

    packet: int
    first_frame: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Every frame that a player would show, in display order. `ticks[0]` is time zero."""

    ticks: tuple[int, ...]  # [N] strictly increasing
    seconds_per_tick: Fraction
    duration_s: float
    is_counted: bool  # timestamps are unusable: the n-th frame out of the decoder is frame n
    packets: dict[int, int]  # tick -> position of its packet in file order; empty if counted
    keyframes: tuple[tuple[int, int], ...]  # (packet, tick) in file order; empty if counted

    def timestamps_s(self) -> list[float]:
        """[N] seconds since the first frame; each the exact rational, rounded once."""
        first, step = self.ticks[0], self.seconds_per_tick
        return [(tick - first) * step.numerator / step.denominator for tick in self.ticks]

    def index_at(self, tick: int) -> int:
        """Display index of the frame on display at `tick`; -1 before the first."""
        return bisect_right(self.ticks, tick) - 1

    def entry_point(self, index: int) -> EntryPoint:
        """The last packet from which decoding shows frame `index`.

        That keyframe must come no later than the frame both in the file and on the screen: in an open GOP,
        frames stored after a keyframe but shown before it still need the previous one.
        """
        tick = self.ticks[index]
        for place in range(bisect_right(self.keyframes, (self.packets.get(tick, 0), tick)) - 1, -1, -1):
            packet, keyframe_tick = self.keyframes[place]
            if keyframe_tick <= tick:
                return EntryPoint(packet, max(self.index_at(keyframe_tick), 0))
        return EntryPoint(0, 0)

    def shares(self, chosen: Sequence[int], count: int) -> list[tuple[int, ...]]:
        """Places in `chosen` (display indices, in order) for each of `count` decoders of about equal work; maybe none.

        Cuts only where decoding jumps ahead to another keyframe and begins anew anyway. The longest pieces go first,
        each to the decoder with the least work so far (Graham, 1969: at most a third more than the optimum).
        """
        pieces: list[list[int]] = []
        works: list[int] = []
        reached = 0
        for place, index in enumerate(chosen):
            entry, packet = self.entry_point(index).packet, self.packets.get(self.ticks[index], 0)
            if not pieces or entry > reached + _MAX_DELAY + 1:
                pieces.append([])
                works.append(_ENTRY_WORK)
            pieces[-1].append(place)
            works[-1] += max(packet - max(entry, reached), 0)
            reached = max(reached, packet)
        shares: list[list[int]] = [[] for _ in range(count)]
        loads = [0] * count
        for work, piece in sorted(zip(works, pieces, strict=True), key=lambda each: -each[0]):
            least = loads.index(min(loads))
            shares[least] += piece
            loads[least] += work
        return [tuple(sorted(share)) for share in shares]


def build_timeline(
    packets: Sequence[PacketFacts],
    time_base: Fraction,
    frame_rate: Fraction | None,
    *,
    trust_pts: bool,
) -> Timeline | None:
    """The timeline of a scanned stream; None if it shows nothing.

    Without usable PTS (`trust_pts` off, or most packets lacking one) frames are counted instead. Their times are
    the decode times, sorted; without those, even times by `frame_rate`.
    """
    shown = [i for i, packet in enumerate(packets) if not packet.is_discard]
    if not shown:
        return None
    with_pts = [i for i in shown if packets[i].pts is not None]
    is_counted = not trust_pts or 2 * len(with_pts) < len(shown)
    keyframes: list[tuple[int, int]] = []
    place: dict[int, int] = {}
    if is_counted:
        ticks, seconds_per_tick, last_duration = _counted(packets, shown, time_base, frame_rate)
    else:
        keyframes = [(i, p.pts) for i, p in enumerate(packets) if p.is_keyframe and p.pts is not None]
        # What precedes the first keyframe, in the file or on the screen, cannot be decoded (a video cut anywhere).
        first, first_pts = keyframes[0] if keyframes else (0, -math.inf)
        place = {pts: i for i in with_pts if i >= first and (pts := packets[i].pts) is not None and pts >= first_pts}
        if not place:
            return None
        ticks, seconds_per_tick = tuple(sorted(place)), time_base
        last_duration = packets[place[ticks[-1]]].duration
    return Timeline(
        ticks=ticks,
        seconds_per_tick=seconds_per_tick,
        duration_s=_duration_s(ticks, seconds_per_tick, last_duration, frame_rate),
        is_counted=is_counted,
        packets=place,
        keyframes=tuple(keyframes),
    )


def _counted(
    packets: Sequence[PacketFacts], shown: list[int], time_base: Fraction, frame_rate: Fraction | None
) -> tuple[tuple[int, ...], Fraction, int]:
    """Ticks, seconds per tick, and how many ticks the last frame lasts."""
    decode_times = {dts for i in shown if (dts := packets[i].dts) is not None}
    if len(decode_times) == len(shown):
        return tuple(sorted(decode_times)), time_base, packets[shown[-1]].duration
    return tuple(range(len(shown))), 1 / frame_rate if frame_rate else _NOMINAL_FRAME, 1


def _duration_s(
    ticks: tuple[int, ...], seconds_per_tick: Fraction, last_duration: int, frame_rate: Fraction | None
) -> float:
    """To the end of the last frame's display; where a file does not say how long that is, the average gap."""
    span = (ticks[-1] - ticks[0]) * seconds_per_tick
    if last_duration > 0:
        last = last_duration * seconds_per_tick
    elif len(ticks) > 1:
        last = span / (len(ticks) - 1)
    else:
        last = 1 / frame_rate if frame_rate else _NOMINAL_FRAME
    return float(span + last)


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
