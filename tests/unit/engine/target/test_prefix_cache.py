"""Rows kept from an ended prompt serve prompts that begin with the same rows, and are evicted for any request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.requests import target_request
from vidspec_models.decoder.kv_cache import CacheGeometry, HiddenRows, KVPool
from vidspec_models.prompt import VIDEO_BITS, Prompt, PromptIdentity
from vidspec_service.engine.target.request import TargetRequest
from vidspec_service.engine.target.scheduler import PrefixCache

pytestmark = pytest.mark.unit

GEOMETRY = CacheGeometry(
    num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float64, device=torch.device("cpu"), context_block=4
)
CHUNK = 4


class Target:
    """A prefix cache and requests; every computed row holds its own token id."""

    def __init__(self, num_tokens: int = 64) -> None:
        self.pool = KVPool(GEOMETRY, num_tokens)
        self.prefixes = PrefixCache(self.pool, CHUNK)

    def new(self, rows: list[int], *keys: str, caller: str = "me", salt: str | None = None) -> TargetRequest:
        nothing = torch.zeros(0)
        prompt = Prompt(
            ids=tuple(rows), embeddings=nothing, rotary=(nothing, nothing), is_video=nothing, next_position=len(rows),
            identity=PromptIdentity(video_keys=keys, rows=np.array(rows)),
        )  # fmt: skip
        request = target_request(prompt, self.pool.new_cache(), caller=caller)
        request.asked = replace(request.asked, cache_salt=salt)
        return request

    def answered(self, rows: list[int], *keys: str, caller: str = "me") -> TargetRequest:
        request = self.new(rows, *keys, caller=caller)
        assert self.pool.grow(request.cache, len(rows) + 3)
        request.cache.keys[0, 0, 0, : len(rows), 0] = torch.tensor(rows, dtype=torch.float64)
        request.cache.length = len(rows) + 3
        return request

    def keep(self, rows: list[int], *keys: str, caller: str = "me") -> None:
        self.prefixes.insert(self.answered(rows, *keys, caller=caller))

    def num_found(self, rows: list[int], *keys: str, caller: str = "me") -> int:
        request = self.new(rows, *keys, caller=caller)
        num_rows = self.prefixes.restore(request, [])
        assert request.cache.length == num_rows
        assert request.cache.keys[0, 0, 0, :num_rows, 0].tolist() == rows[:num_rows]
        self.pool.release(request.cache)
        return num_rows


def test_a_follow_up_begins_with_the_whole_chunks_it_shares() -> None:
    target = Target()
    target.keep([7, -1, -2, -3, -4, -5, 8, 9, 10, 11], "video")
    assert target.num_found([7, -1, -2, -3, -4, -5, 8, 3, 3, 3], "video") == 4


def test_another_video_never_gets_it_though_every_token_is_equal() -> None:
    target = Target()
    rows = [7, -1, -2, -3, -4, -5, 8, 9, 10, 11]
    target.keep(rows, "mine")
    assert target.num_found(rows, "yours") == 0


def test_another_video_gets_what_comes_before_it() -> None:
    target = Target()
    second = -1 - (1 << VIDEO_BITS)
    rows = [7, -1, -2, -3, -4, 8, 9, 10, second, second - 1, 11, 12]
    target.keep(rows, "mine", "first")
    assert target.num_found([*rows, 1, 2], "mine", "first") == 12
    assert target.num_found([*rows, 1, 2], "mine", "second") == 8
    assert target.num_found([*rows[:8], 1, 2], "mine") == 8
    assert target.num_found([*rows, 1, 2], "yours", "first") == 0


def test_instructions_before_the_first_video_serve_other_videos_and_prompts_without_any() -> None:
    target = Target()
    words = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    target.keep([*words, -1, -2, 15], "video")
    assert target.num_found([*words, -1, -2, 15], "other") == 8
    assert target.num_found([*words, 16]) == 8
    target.keep([20, *words])
    assert target.num_found([20, *words, -1], "video") == 8


def test_what_a_caller_says_or_shows_is_nothing_to_another() -> None:
    target = Target()
    rows = [7, 8, 9, 10, 11, 12, 13, 14, -1, -2, 15]
    target.keep(rows, "video")
    target.keep(rows[:8])
    other = target.answered(rows, "video", caller="other")
    for keys in (("video",), ()):
        assert target.num_found(rows, *keys, caller="stranger") == 0
    assert target.prefixes.restore(target.new(rows, "video", caller="stranger"), [other]) == 0
    assert target.prefixes.restore(target.new(rows, "video", salt="a user"), []) == 0


def test_the_last_row_is_always_computed() -> None:
    target = Target()
    rows = [1, -1, -2, 2, 3, 4, 5, 6]
    target.keep(rows, "video")
    assert target.num_found(rows, "video") == 4


def test_compressed_caches_short_prompts_and_those_without_identity_leave_nothing() -> None:
    target = Target()
    anonymous, compressed = target.answered([1] * 8), target.answered([1] * 8, "video")
    anonymous.prompt = replace(anonymous.prompt, identity=None)
    compressed.cache.hidden = HiddenRows(first_layer=0, count=1, order=torch.arange(4), attention=torch.zeros(4))
    for request in (anonymous, compressed, target.answered([1] * 3)):
        target.prefixes.insert(request)
    assert target.pool.num_used == 0
    assert not target.prefixes.evict()


def test_of_what_is_kept_and_what_others_have_the_longest_is_copied() -> None:
    target = Target(128)
    longer = [7, -1, -2, -3, -4, -5, -6, -7, 8]
    target.keep([7, -1, -2, -3, 8], "video")
    request = target.new([*longer[:8], 3, 3], "video")
    assert target.prefixes.restore(request, []) == 4
    other, stranger = target.answered(longer, "video"), target.answered([1] * 9)
    other.cache.hidden = HiddenRows(first_layer=0, count=1, order=torch.arange(4), attention=torch.zeros(4))
    assert target.prefixes.restore(request, [other, stranger]) == 4
    other.cache.hidden = None
    assert target.prefixes.restore(request, [other, stranger]) == request.cache.length == 8
    assert request.cache.keys[0, 0, 0, :8, 0].tolist() == longer[:8]
    assert target.prefixes.restore(request, []) == request.cache.length == 8, "less than there is"
    while target.prefixes.evict():
        pass
    assert other.cache.length, "what others have is theirs"


def test_the_same_beginning_is_kept_once() -> None:
    target = Target()
    for last in range(5):
        target.keep([1, -1, -2, 2, 100 + last], "video")
    assert target.pool.num_used == CHUNK


def test_the_prefix_that_was_not_used_for_the_longest_time_gives_way_first() -> None:
    target = Target()
    rows = [1, -1, -2, 2, 5]
    for name in "abca":
        target.keep(rows, name)
    assert target.num_found(rows, "b") == 4
    for name in "cab":
        assert target.prefixes.evict()
        assert target.num_found(rows, name) == 0, name


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 14)), max_size=30))
def test_the_budget_is_never_overdrawn_and_all_of_it_comes_back(questions: list[tuple[int, int, int]]) -> None:
    target = Target(48)
    pool = target.pool
    for video, word, length in questions:
        rows = [5, -1, -2, -3, *[word] * length]
        request = target.new(rows, f"video-{video}")
        num_rows = target.prefixes.restore(request, [])
        assert num_rows % CHUNK == 0
        assert num_rows < len(rows)
        assert request.cache.keys[0, 0, 0, :num_rows, 0].tolist() == rows[:num_rows]
        while not pool.grow(request.cache, len(rows) + 2):
            assert target.prefixes.evict()
        request.cache.keys[0, 0, 0, : len(rows), 0] = torch.tensor(rows, dtype=torch.float64)
        request.cache.length = len(rows) + 2
        assert pool.usage == request.cache.capacity / pool.num_tokens  # kept rows of others do not count
        target.prefixes.insert(request)
        assert 0 <= pool.num_used <= pool.num_tokens
        assert pool.usage == 0
    while target.prefixes.evict():
        pass
    assert pool.num_used == pool.usage == 0
