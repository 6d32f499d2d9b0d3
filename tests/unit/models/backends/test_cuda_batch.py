"""Requests to the CUDA step become forwards of a few shapes with one table each."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vidspec_models.backends.cuda.batch import BLOCK_BUCKETS, StepInputs, bucket, forwards, num_inputs
from vidspec_models.decoder.decoder import Segment
from vidspec_models.decoder.kv_cache import CacheGeometry, KVCache

GEOMETRY = CacheGeometry(
    num_layers=1, num_kv_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"), context_block=64
)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 64), st.integers(1, 64))
def test_every_row_comes_once_in_order_within_the_limits(counts: list[int], per_block: int, most_rows: int) -> None:
    cache = KVCache(GEOMETRY, 0)
    segments = [Segment(cache, 1000 * number, count) for number, count in enumerate(counts)]
    found = forwards(segments, per_block, most_rows)
    rows = [block.start + i for blocks in found for block in blocks for i in range(block.num_rows)]
    assert rows == [segment.start + i for segment in segments for i in range(segment.num_rows)]
    for blocks in found:
        assert 0 < sum(block.num_rows for block in blocks) <= most_rows
        assert len(blocks) <= BLOCK_BUCKETS[-1]
        assert all(0 < block.num_rows <= per_block for block in blocks)


def test_one_request_of_a_few_rows_is_one_forward_of_one_block() -> None:
    (blocks,) = forwards([Segment(KVCache(GEOMETRY, 0), 0, 9)], 9, 64)
    assert (bucket(9, (16, 64)), bucket(len(blocks), BLOCK_BUCKETS)) == (16, 1)
    assert [bucket(count, (16, 64)) for count in (1, 16, 17, 64)] == [16, 16, 64, 64]


def test_a_table_names_every_row_and_nothing_of_the_forward_before() -> None:
    table = StepInputs.of(np.zeros(num_inputs(8), np.int64), 8)
    small, large = KVCache(GEOMETRY, 64), KVCache(GEOMETRY, 128)
    places = [[cache.keys.data_ptr(), cache.values.data_ptr(), cache.capacity] for cache in (small, large)]
    (first,) = forwards([Segment(small, 10, 5), Segment(large, 20, 3)], 4, 8)
    table.fill(first, [1, 2, 3, 4, 5, 6, 7, 8], range(30, 38))
    assert table.rows[:, :3].tolist() == [places[0]] * 5 + [places[1]] * 3
    assert table.rows[:, 3].tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    assert table.blocks[:3].tolist() == [[*places[0], 0, 4, 10], [*places[0], 4, 1, 14], [*places[1], 5, 3, 20]]
    (second,) = forwards([Segment(small, 10, 1)], 4, 8)
    table.fill(second, [9], [40])
    assert table.ids.tolist() == [9] + [0] * 7
    assert table.rows[:, 3].tolist() == [10] + [-1] * 7
    assert not table.blocks[1:].any()
