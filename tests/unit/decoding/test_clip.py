"""Refusals for size name the limit that holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vidspec_service.decoding.clip import DecodingLimits, FrameRequest
from vidspec_service.decoding.selection import select_sequence
from vidspec_service.errors import VideoTooLarge

LIMITS = DecodingLimits(max_frames=8, max_decoded_bytes=9000, max_pixels=1000)


@pytest.mark.parametrize(
    ("check", "whole", "half"),
    [
        (lambda limits: limits.check_num_frames(9), "8", "4"),
        (lambda limits: limits.check_decoded_bytes(4, 32, 32), "9,000", "4,500"),
        (lambda limits: select_sequence(range(9), 9.0, FrameRequest(), limits), "8", "4"),
    ],
    ids=["frames", "bytes", "own frames"],
)
def test_a_limit_that_videos_share_is_told_as_each_ones_part(
    check: Callable[[DecodingLimits], object], whole: str, half: str
) -> None:
    for limits, told in ((LIMITS, whole), (LIMITS.shared(2), f"{half} for each of 2 videos")):
        with pytest.raises(VideoTooLarge, match=rf"the limit is {told} \(VIDSPEC_"):
            check(limits)


def test_what_just_fits_is_not_refused() -> None:
    LIMITS.check_num_frames(8)
    LIMITS.check_decoded_bytes(3, 40, 25)
    LIMITS.check_pixels(40, 25)
    assert len(select_sequence(range(8), 8.0, FrameRequest(), LIMITS).indices) == 8


@pytest.mark.parametrize(("max_pixels", "told"), [(1000, "2000"), (2**31, "2147483647")])
def test_ffmpeg_takes_no_memory_for_a_picture_far_over_the_limit(max_pixels: int, told: str) -> None:
    assert DecodingLimits(max_pixels=max_pixels).max_padded_pixels == told
