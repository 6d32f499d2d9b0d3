"""Rows kept from an ended prompt serve prompts that begin with the same rows, and are evicted for any request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vidspec_models.decoder.kv_cache import CacheGeometry, HiddenRows, KVCache, KVPool
from vidspec_models.prompt import VIDEO_BITS, Prompt, PromptIdentity
from vidspec_service.engine.target.scheduler import PrefixCache

pytestmark = pytest.mark.unit

GEOMETRY = CacheGeometry(
    num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"), context_block=4
)
CHUNK = 4


def prompt(rows: list[int], *keys: str) -> Prompt:
    nothing = torch.zeros(0)
    return Prompt(
        ids=tuple(rows),
        embeddings=nothing,
        rotary=(nothing, nothing),
        is_video=nothing,
        next_position=len(rows),
        identity=PromptIdentity(video_keys=keys, rows=np.array(rows)) if keys else None,
    )


def filled(pool: KVPool, of: Prompt, num_answer: int = 3) -> KVCache:
    """A cache after a prompt and its answer; every row holds its own token id."""
    cache = pool.new_cache()
    assert pool.grow(cache, of.num_tokens + num_answer)
    cache.keys[0, 0, 0, : of.num_tokens, 0] = torch.tensor(of.ids, dtype=torch.float32)
    cache.length = of.num_tokens + num_answer
    return cache


def begun(prefixes: PrefixCache, pool: KVPool, of: Prompt) -> tuple[int, KVCache]:
    cache = pool.new_cache()
    return prefixes.restore(of, cache, []), cache


def test_a_follow_up_begins_with_the_whole_chunks_it_shares() -> None:
    pool = KVPool(GEOMETRY, 64)
    prefixes = PrefixCache(pool, CHUNK)
    first = prompt([7, -1, -2, -3, -4, -5, 8, 9, 10, 11], "video")
    prefixes.insert(first, filled(pool, first))
    num_rows, cache = begun(prefixes, pool, prompt([7, -1, -2, -3, -4, -5, 8, 3, 3, 3], "video"))
    assert num_rows == cache.length == 4
    assert cache.keys[0, 0, 0, :4, 0].tolist() == [7, -1, -2, -3]


def test_another_video_never_gets_it_though_every_token_is_equal() -> None:
    pool = KVPool(GEOMETRY, 64)
    prefixes = PrefixCache(pool, CHUNK)
    rows = [7, -1, -2, -3, -4, -5, 8, 9, 10, 11]
    prefixes.insert(prompt(rows, "mine"), filled(pool, prompt(rows, "mine")))
    assert begun(prefixes, pool, prompt(rows, "yours"))[0] == 0
    assert begun(prefixes, pool, prompt(rows))[0] == 0


def test_another_second_video_gets_what_comes_before_it() -> None:
    pool = KVPool(GEOMETRY, 64)
    prefixes = PrefixCache(pool, CHUNK)
    second = -1 - (1 << VIDEO_BITS)
    rows = [7, -1, -2, -3, -4, 8, 9, 10, second, second - 1, 11, 12]
    prefixes.insert(prompt(rows, "mine", "first"), filled(pool, prompt(rows, "mine", "first")))
    assert begun(prefixes, pool, prompt([*rows, 1, 2], "mine", "first"))[0] == 12
    assert begun(prefixes, pool, prompt([*rows, 1, 2], "mine", "second"))[0] == 8
    assert begun(prefixes, pool, prompt([*rows[:8], 1, 2], "mine"))[0] == 8
    assert begun(prefixes, pool, prompt([*rows, 1, 2], "yours", "first"))[0] == 0


def test_what_a_caller_says_before_a_video_is_nothing_to_another() -> None:
    pool = KVPool(GEOMETRY, 64)
    prefixes = PrefixCache(pool, CHUNK)
    rows = [7, 8, 9, 10, 11, 12, 13, 14, -1, -2, 15]
    prefixes.insert(prompt(rows, "mine"), filled(pool, prompt(rows, "mine")))
    assert begun(prefixes, pool, prompt(rows, "yours"))[0] == 0


def test_the_last_row_is_always_computed() -> None:
    pool = KVPool(GEOMETRY, 64)
    prefixes = PrefixCache(pool, CHUNK)
    same = prompt([1, -1, -2, 2, 3, 4, 5, 6], "video")
    prefixes.insert(same, filled(pool, same))
    assert begun(prefixes, pool, same)[0] == 4


def test_compressed_caches_and_prompts_without_identity_leave_nothing() -> None:
    pool = KVPool(GEOMETRY, 64)
    prefixes = PrefixCache(pool, CHUNK)
    anonymous, compressed = prompt([1] * 8), prompt([1] * 8, "video")
    prefixes.insert(anonymous, filled(pool, anonymous))
    cache = filled(pool, compressed)
    cache.hidden = HiddenRows(first_layer=0, count=1, order=torch.arange(4), attention=torch.zeros(4))
    prefixes.insert(compressed, cache)
    assert pool.num_used == 0
    assert not prefixes.evict()


def test_of_what_is_kept_and_what_others_have_the_longest_is_copied() -> None:
    pool = KVPool(GEOMETRY, 128)
    prefixes = PrefixCache(pool, CHUNK)
    kept, longer = prompt([7, -1, -2, -3, 8], "video"), prompt([7, -1, -2, -3, -4, -5, -6, -7, 8], "video")
    prefixes.insert(kept, filled(pool, kept))
    asked, cache = prompt([*longer.ids[:8], 3, 3], "video"), pool.new_cache()
    assert prefixes.restore(asked, cache, []) == 4
    other = filled(pool, longer)
    other.hidden = HiddenRows(first_layer=0, count=1, order=torch.arange(4), attention=torch.zeros(4))
    assert prefixes.restore(asked, cache, [(longer, other), (prompt([1] * 9), filled(pool, longer))]) == 4
    other.hidden = None
    assert prefixes.restore(asked, cache, [(longer, other)]) == cache.length == 8
    assert cache.keys[0, 0, 0, :8, 0].tolist() == list(longer.ids[:8])
    assert prefixes.restore(asked, cache, []) == cache.length == 8, "less than there is"
    while prefixes.evict():
        pass
    assert other.length, "what others have is theirs"


def test_the_same_beginning_is_kept_once() -> None:
    pool = KVPool(GEOMETRY, 64)
    prefixes = PrefixCache(pool, CHUNK)
    for last in range(5):
        again = prompt([1, -1, -2, 2, 100 + last], "video")
        prefixes.insert(again, filled(pool, again))
    assert pool.num_used == CHUNK


def test_the_prefix_that_was_not_used_for_the_longest_time_gives_way_first() -> None:
    pool = KVPool(GEOMETRY, 64)
    prefixes = PrefixCache(pool, CHUNK)
    of_video = {name: prompt([1, -1, -2, 2, 5], name) for name in "abc"}
    for name in "abca":
        prefixes.insert(of_video[name], filled(pool, of_video[name]))
    begun(prefixes, pool, of_video["b"])
    for name in "cab":
        assert prefixes.evict()
        assert begun(prefixes, pool, of_video[name])[0] == 0, name


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 14)), max_size=30))
def test_the_budget_is_never_overdrawn_and_all_of_it_comes_back(questions: list[tuple[int, int, int]]) -> None:
    pool = KVPool(GEOMETRY, 48)
    prefixes = PrefixCache(pool, CHUNK)
    for video, word, length in questions:
        asked = prompt([5, -1, -2, -3, *[word] * length], f"video-{video}")
        cache = pool.new_cache()
        num_rows = prefixes.restore(asked, cache, [])
        assert num_rows % CHUNK == 0
        assert num_rows < asked.num_tokens
        assert cache.keys[0, 0, 0, :num_rows, 0].tolist() == list(asked.ids[:num_rows])
        while not pool.grow(cache, asked.num_tokens + 2):
            assert prefixes.evict()
        cache.keys[0, 0, 0, : asked.num_tokens, 0] = torch.tensor(asked.ids, dtype=torch.float32)
        cache.length = asked.num_tokens + 2
        assert pool.usage == cache.capacity / pool.num_tokens  # kept rows of others do not count
        prefixes.insert(asked, cache)
        assert 0 <= pool.num_used <= pool.num_tokens
        assert pool.usage == 0
    while prefixes.evict():
        pass
    assert pool.num_used == pool.usage == 0
