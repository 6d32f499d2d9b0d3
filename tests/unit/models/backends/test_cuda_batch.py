"""What the CUDA step is asked for, as forwards of few shapes and one table each: pure logic."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vidspec_models.backends.cuda.batch import BLOCK_BUCKETS, Place, StepTable, bucket, forwards, table_size


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.integers(1, 64), st.integers(1, 64))
def test_every_row_comes_once_in_order_within_the_limits(counts: list[int], per_block: int, most_rows: int) -> None:
    found = forwards(counts, per_block, most_rows)
    rows = [(piece.segment, piece.first + i) for pieces in found for piece in pieces for i in range(piece.count)]
    assert rows == [(segment, row) for segment, count in enumerate(counts) for row in range(count)]
    for pieces in found:
        assert 0 < sum(piece.count for piece in pieces) <= most_rows
        assert len(pieces) <= BLOCK_BUCKETS[-1]
        assert all(0 < piece.count <= per_block for piece in pieces)


def test_one_request_of_a_few_rows_is_one_forward_of_one_block() -> None:
    (pieces,) = forwards([9], 9, 64)
    assert (bucket(9, (16, 64)), bucket(len(pieces), BLOCK_BUCKETS)) == (16, 1)
    assert [bucket(count, (16, 64)) for count in (1, 16, 17, 64)] == [16, 16, 64, 64]


def test_a_table_names_every_row_and_nothing_of_the_forward_before() -> None:
    table = StepTable(8, np.zeros(table_size(8), np.int64))
    places = [Place(100, 200, 64, 10), Place(300, 400, 128, 20)]
    (first,) = forwards([5, 3], 4, 8)
    table.fill(first, [1, 2, 3, 4, 5, 6, 7, 8], range(30, 38), places)
    assert table.rows[:, 3].tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    assert table.blocks[:3].tolist() == [[100, 200, 64, 0, 4, 10], [100, 200, 64, 4, 1, 14], [300, 400, 128, 5, 3, 20]]
    (second,) = forwards([1], 4, 8)
    table.fill(second, [9], [40], places)
    assert table.ids.tolist() == [9] + [0] * 7
    assert table.rows[:, 3].tolist() == [10] + [-1] * 7
    assert not table.blocks[1:].any()
