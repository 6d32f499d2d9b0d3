"""Which frames of a video are chosen, and how they are picked out while it is decoded. Pure; knows no file.

Frames are chosen by what is *on display* at an instant, so variable frame rates need no special case.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from vidspec_service.decoding.clip import DecodingLimits, FrameRequest, over_limit
from vidspec_service.errors import InvalidRequest

# Matroska and others round times to 1 ms, so frame 2 at 30 fps sits at 0.067 s, after 2/30 s: without this
# slack, asking for a clip's own rate would skip frames. Never more than a quarter of a frame.
_ROUNDING_S = 0.001
_EXACT_S = 1e-9  # sums of times that are equal on paper may differ by this much

Frame = TypeVar("Frame")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSelection:
    """Display-order indices, strictly increasing, at least one; and warnings for the caller."""

    indices: tuple[int, ...]
    warnings: tuple[str, ...] = ()


def select_frames(
    timestamps_s: Sequence[float],  # [N] of every displayable frame, strictly increasing from 0
    duration_s: float,  # end of the last frame's display, greater than its timestamp
    request: FrameRequest,
    limits: DecodingLimits,
    *,
    default_num_frames: int,
) -> FrameSelection:
    """Choose frames; raises InvalidRequest for a start past the end."""
    warnings: list[str] = []
    start_s, end_s = _window(duration_s, request, warnings)
    display = _Display(timestamps_s, duration_s)
    max_frames = min(request.max_frames or limits.max_frames, limits.max_frames)
    if request.fps is not None:
        indices = display.at_rate(start_s, end_s, request.fps)
        if len(indices) > max_frames:
            warnings.append(
                f"fps={request.fps:g} would need {len(indices)} frames; {max_frames} evenly spread frames are used."
            )
            indices = display.at_midpoints(start_s, end_s, max_frames)
    else:
        wanted = request.num_frames or default_num_frames
        num_frames = min(wanted, max_frames)
        if request.num_frames is not None and num_frames < wanted:
            warnings.append(f"num_frames is lowered from {wanted} to max_frames, {num_frames}.")
        indices = display.at_midpoints(start_s, end_s, num_frames)
        if len(indices) < num_frames:
            warnings.append(f"Only {len(indices)} distinct frames are available, not {num_frames}.")
    return FrameSelection(indices=indices, warnings=tuple(warnings))


def select_sequence(
    timestamps_s: Sequence[float],  # [N] strictly increasing; the client chooses where zero is
    duration_s: float,
    request: FrameRequest,
    limits: DecodingLimits,
) -> FrameSelection:
    """Choose among a client's own frames: all in the time window, unless the request asks for something else.

    Raises what `select_frames` does; InvalidRequest for a window without a frame, VideoTooLarge for too many.
    """
    start_s = max(request.start_s or 0.0, timestamps_s[0])
    end_s = math.inf if request.end_s is None else request.end_s
    inside = tuple(index for index, time_s in enumerate(timestamps_s) if start_s <= time_s < end_s)
    if not inside:
        raise InvalidRequest("No frame lies between start_s and end_s.", param="start_s")
    is_asked = request.fps is not None or request.num_frames is not None
    if is_asked or len(inside) > (request.max_frames or len(inside)):
        wanted = replace(request, start_s=start_s)
        chosen = select_frames(timestamps_s, duration_s, wanted, limits, default_num_frames=len(inside))
        if is_asked:
            return chosen
        warning = f"{len(chosen.indices)} evenly spread frames of {len(inside)} are used (max_frames)."
        return replace(chosen, warnings=(*chosen.warnings, warning))
    if len(inside) > limits.max_frames:
        raise over_limit(f"There are {len(inside)} frames", limits.describe(limits.max_frames), "VIDSPEC_MAX_FRAMES")
    return FrameSelection(indices=inside)


def _window(duration_s: float, request: FrameRequest, warnings: list[str]) -> tuple[float, float]:
    start_s = request.start_s or 0.0
    if start_s >= duration_s:
        fact = f"start_s is {start_s:g}, but the clip lasts {duration_s:.3f} s."
        raise InvalidRequest(fact, param="start_s")
    if request.end_s is None:
        return start_s, duration_s
    if request.end_s > duration_s + _ROUNDING_S:
        warnings.append(f"end_s is {request.end_s:g}, but the clip lasts {duration_s:.3f} s.")
    return start_s, min(request.end_s, duration_s)


class _Display:
    """A clip as a screen shows it: at any time, the last frame whose timestamp has passed."""

    def __init__(self, timestamps_s: Sequence[float], duration_s: float) -> None:
        self._timestamps_s = timestamps_s
        self._slack_s = min(_ROUNDING_S, duration_s / len(timestamps_s) / 4)

    def _frame_at(self, time_s: float, end_s: float) -> int:
        """Index of the frame on display; never one that begins at the window's end or later: the end is excluded."""
        latest_s = max(time_s, min(time_s + self._slack_s, end_s - _EXACT_S))
        return max(bisect_right(self._timestamps_s, latest_s) - 1, 0)

    def at_midpoints(self, start_s: float, end_s: float, count: int) -> tuple[int, ...]:
        """The frames at the middles of `count` equal parts of the window; all of them, if there are no more."""
        first = min(self._frame_at(start_s, end_s), bisect_left(self._timestamps_s, start_s))
        end = bisect_left(self._timestamps_s, end_s - _EXACT_S)
        if end - first <= count:  # where frames stay for different times, the middles may miss some
            return tuple(range(first, max(end, first + 1)))
        step_s = (end_s - start_s) / count
        return _distinct(self._frame_at(start_s + (i + 0.5) * step_s, end_s) for i in range(count))

    def at_rate(self, start_s: float, end_s: float, fps: float) -> tuple[int, ...]:
        """The frames at start, start + 1/fps, ... before the end. The number of frames bounds that of the steps."""
        found: list[int] = []
        tick = 0
        while not found or start_s + tick / fps < end_s - _EXACT_S:
            index = self._frame_at(start_s + tick / fps, end_s)
            found.append(index)
            if index + 1 == len(self._timestamps_s):
                break
            # Straight to the first tick that shows another frame: a high fps must not cost a long loop.
            next_change_s = self._timestamps_s[index + 1] - self._slack_s - start_s
            tick = max(tick + 1, math.ceil(next_change_s * fps))
        return _distinct(found)


def _distinct(indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(indices))


class FramePicker(Generic[Frame]):
    """Fed with (display index, frame) in display order; gives out each chosen frame once, in order.

    A chosen frame that never comes (damaged, dropped by the decoder) is replaced by a decoded neighbour not
    given out itself: the one before, which a player would go on showing, else the one after.
    """

    def __init__(self, chosen: Iterable[int]) -> None:
        self._wanted = deque(chosen)
        self._previous: tuple[int, Frame] | None = None  # the only frame kept alive
        self._last_given = -1
        self.num_replaced = 0
        self.num_lost = 0

    @property
    def wanted(self) -> tuple[int, ...]:
        """Display indices still to come."""
        return tuple(self._wanted)

    @property
    def next_wanted(self) -> int | None:
        """Display index of the next chosen frame; None when all have been dealt with."""
        return self._wanted[0] if self._wanted else None

    def offer(self, index: int, frame: Frame) -> Iterator[tuple[int, Frame]]:
        """Take one decoded frame; yield the chosen frames that it settles."""
        while self._wanted and self._wanted[0] < index:
            yield from self._stand_in(self._wanted.popleft(), index, frame)
        if self._wanted and self._wanted[0] == index:
            del self._wanted[0]
            yield self._give(index, frame)
        self._previous = (index, frame)

    def finish(self) -> Iterator[tuple[int, Frame]]:
        """The decoder is empty; settle the frames that are still wanted."""
        while self._wanted:
            yield from self._stand_in(self._wanted.popleft(), -1, None)

    def forget_previous(self) -> None:
        """Decoding jumps ahead: what was on display here says nothing about what comes next."""
        self._previous = None

    def _stand_in(self, missing: int, index: int, frame: Frame | None) -> Iterator[tuple[int, Frame]]:
        if self._previous is not None and self._previous[0] > self._last_given:
            # A frame off by one is not counted: a player shows it, and where each field is a packet nothing is damaged.
            self.num_replaced += missing - self._previous[0] > 1
            yield self._give(*self._previous)
        elif frame is not None and index > self._last_given and index not in self._wanted:
            self.num_replaced += 1
            yield self._give(index, frame)
        else:
            self.num_lost += 1

    def _give(self, index: int, frame: Frame) -> tuple[int, Frame]:
        self._last_given = index
        return index, frame
