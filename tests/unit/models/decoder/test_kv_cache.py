"""Rollback is a length; capacity is padded; misuse is an error."""

from dataclasses import replace

import pytest
import torch

from vidspec_models.decoder.kv_cache import CacheGeometry, KVCache, KVPool, LayerSpan

GEOMETRY = CacheGeometry(
    num_layers=2, num_kv_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"), context_block=64
)


def test_capacity_is_a_multiple_of_the_context_block() -> None:
    assert KVCache(GEOMETRY, 65).capacity == 128
    assert KVCache(GEOMETRY, 64).capacity == 64
    assert KVPool(GEOMETRY, 127).num_tokens == 64, "half a block is of no use"


def test_truncation_only_moves_the_length_back() -> None:
    cache = KVCache(GEOMETRY, 10)
    cache.length = 7
    cache.truncate(3)
    assert cache.length == 3
    with pytest.raises(ValueError, match="cannot truncate"):
        cache.truncate(4)


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert GEOMETRY.bytes_per_token() == 2 * 2 * 1 * 4 * 4


def test_a_device_holds_the_bytes_of_its_own_layers() -> None:
    first, second = (torch.device("cuda", number) for number in range(2))
    split = (LayerSpan(first, range(3)), LayerSpan(second, range(3, 4)))
    geometry = replace(GEOMETRY, num_layers=4, device=first, split=split)
    assert [geometry.bytes_per_token_on(device) for device in (first, second)] == [3 * 32, 32]
