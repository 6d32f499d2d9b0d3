"""A payload carries conversation and frames bit for bit and leaves nothing behind."""

import os

import numpy as np

from vidspec_service.engine.payload import read_payload, write_payload
from vidspec_service.engine.types import ChatMessage, VideoInput


def video(seed: int, shape: tuple[int, int, int, int]) -> VideoInput:
    return VideoInput(
        frames=np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8),
        timestamps_s=tuple(0.5 * i for i in range(shape[0])),
        source_indices=tuple(range(shape[0])),
        source_fps=29.97,
        source_num_frames=100,
        duration_s=3.3,
    )


def test_frames_of_several_videos_arrive_unchanged() -> None:
    messages = (ChatMessage(role="user", text="Was ist das? 🎬", num_videos=2), ChatMessage(role="assistant", text=""))
    videos = (video(0, (3, 5, 7, 3)), video(1, (1, 2, 2, 3)))
    got_messages, got_videos = read_payload(write_payload(messages, videos))
    assert got_messages == messages
    for got, sent in zip(got_videos, videos, strict=True):
        np.testing.assert_array_equal(got.frames, sent.frames)
        assert (got.timestamps_s, got.source_fps, got.duration_s) == (sent.timestamps_s, 29.97, 3.3)


def test_frames_need_not_be_contiguous() -> None:
    base = video(0, (4, 6, 6, 3))
    strided = VideoInput(
        frames=base.frames[::2, ::-1],
        timestamps_s=(0.0, 1.0),
        source_indices=(0, 2),
        source_fps=1.0,
        source_num_frames=4,
        duration_s=4.0,
    )
    _, (got,) = read_payload(write_payload((), (strided,)))
    np.testing.assert_array_equal(got.frames, base.frames[::2, ::-1])


def test_reading_closes_the_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        read_payload(write_payload((), ()))
    assert len(os.listdir("/proc/self/fd")) == before
