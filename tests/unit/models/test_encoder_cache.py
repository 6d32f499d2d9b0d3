"""Features are kept within a budget that counts all bytes; the least recently used are evicted first."""

from __future__ import annotations

import numpy as np
import torch

from vidspec_models.encoder_cache import EncodedVideo, EncoderCache
from vidspec_models.prompt import NO_CELL
from vidspec_models.request import Video

VIDEO_BYTES = 2 * 4 * 4 * 4  # features and one layer of deepstack features


def video(key: str | None) -> Video:
    frames = np.zeros((1, 2, 2, 3), np.uint8)
    return Video(frames=frames, source_indices=(0,), source_fps=1.0, source_num_frames=1, duration_s=1.0, key=key)


def test_frames_are_counted_on_and_a_row_of_no_cell_stays_one() -> None:
    grid = torch.tensor([[0, 0, 0], [1, 2, 3], [NO_CELL] * 3])
    encoded = EncodedVideo(placeholder_text="v", features=torch.zeros(3, 4), shape=(2, 3, 4), grid=grid)
    assert encoded.grid_from(5).tolist() == [[5, 0, 0], [6, 2, 3], [NO_CELL] * 3]


class Tower:
    """Records the videos it was asked to encode."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def __call__(self, video: Video) -> EncodedVideo:
        self.asked.append(video.key)
        rows = torch.zeros(12 if video.key == "large" else 4, 4)
        return EncodedVideo(
            placeholder_text="v", features=rows, shape=(1, 2, 2), grid=torch.zeros(4, 3), deepstack=(rows,)
        )


def test_where_there_is_room_for_two_the_one_not_asked_for_the_longest_goes() -> None:
    cache, tower = EncoderCache(2 * VIDEO_BYTES), Tower()
    for key in "abacabb":
        cache.get(video(key), tower)
    assert tower.asked == ["a", "b", "c", "b"]


def test_what_has_no_key_or_is_larger_than_all_the_room_is_not_kept() -> None:
    tower = Tower()
    for cache, key in ((EncoderCache(2 * VIDEO_BYTES), None), (EncoderCache(VIDEO_BYTES - 1), "a")):
        for _ in range(2):
            assert cache.get(video(key), tower).num_bytes == VIDEO_BYTES
    assert tower.asked == [None, None, "a", "a"]


def test_a_video_as_large_as_all_the_room_is_kept() -> None:
    cache, tower = EncoderCache(VIDEO_BYTES), Tower()
    for _ in range(2):
        cache.get(video("a"), tower)
    assert tower.asked == ["a"]


def test_a_video_larger_than_all_the_room_pushes_no_other_out() -> None:
    cache, tower = EncoderCache(2 * VIDEO_BYTES), Tower()
    for key in ("a", "b", "large", "a", "b"):
        cache.get(video(key), tower)
    assert tower.asked == ["a", "b", "large"]
