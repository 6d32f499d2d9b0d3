"""Refusals for size name the limit that holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vidspec_service.decoding.clip import FrameRequest
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.decoding.selection import select_sequence
from vidspec_service.errors import VideoTooLarge

LIMITS = DecodingLimits(max_frames=8, max_decoded_bytes=9000)


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
