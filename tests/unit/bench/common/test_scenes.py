"""Clips of test scenes, at any number of frames."""

from __future__ import annotations

from vidspec_service.bench.common.scenes import scene_video


def test_a_clip_has_the_frames_that_were_asked_for_over_its_whole_time() -> None:
    clip = scene_video(3, 80)
    assert clip.frames.shape == (80, 128, 128, 3)
    assert (clip.source_indices[0], clip.source_indices[-1]) == (0, 79)
    assert len(scene_video(3, 20).frames) == len(scene_video(3, 20).source_indices) == 20
    assert scene_video(3).frames.shape[0] == 8
