"""Hidden rows: the formula that selects them; they are moved aside and can be restored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vidspec_models.compression.dycoke import attention_of_row, begin_hiding, change_hidden, hidden_by, still_stands
from vidspec_models.decoder.kv_cache import CacheGeometry, KVCache

GEOMETRY = CacheGeometry(
    num_layers=4, num_kv_heads=2, head_dim=3, dtype=torch.float32, device=torch.device("cpu"), context_block=4
)


def test_attention_is_the_mean_over_heads_of_a_softmax_over_all_rows() -> None:
    queries, keys = torch.randn(4, 3), torch.randn(2, 9, 3)
    repeated = keys.repeat_interleave(2, 0)  # query head h reads key head h // 2
    expected = torch.stack([torch.softmax(repeated[h] @ queries[h] * 0.7, 0) for h in range(4)]).mean(0)
    assert torch.allclose(attention_of_row(queries, keys, 0.7), expected)


@given(values=st.lists(st.integers(0, 5), min_size=1, max_size=30), data=st.data())
def test_the_least_attended_are_hidden_and_of_equals_the_later(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(values)))
    hidden = hidden_by(torch.tensor(values, dtype=torch.float32), count).tolist()
    ranked = sorted(range(len(values)), key=lambda i: (values[i], -i))
    assert hidden == sorted(ranked[:count])


def test_the_gate_is_a_cosine_of_nine_tenths() -> None:
    before = torch.tensor([1.0, 0.0])
    assert still_stands(torch.tensor([3.0, 0.0]), before)
    assert still_stands(torch.tensor([0.91, 0.4146]), before)
    assert not still_stands(torch.tensor([0.89, 0.456]), before)


def filled(num_rows: int) -> KVCache:
    """A cache whose row i holds i everywhere, plus 100 times its layer."""
    stored = KVCache(GEOMETRY, num_rows)
    stored.length = num_rows
    for tensor in (stored.keys, stored.values):
        tensor += torch.arange(stored.capacity)[:, None] + 100.0 * torch.arange(4)[:, None, None, None, None]
    return stored


def rows_of(stored: KVCache, layer: int) -> list[int]:
    assert torch.equal(stored.keys, stored.values)
    return (stored.keys[layer, 0, 1, : stored.length, 2] - 100 * layer).int().tolist()


@given(choices=st.lists(st.sets(st.integers(2, 13), min_size=4, max_size=4), min_size=1, max_size=6))
def test_hidden_rows_are_in_front_and_every_row_is_stored_and_can_return(choices: list[set[int]]) -> None:
    stored, nothing = filled(18), torch.zeros(0)
    for chosen in choices:
        hidden = torch.tensor(sorted(chosen))
        if stored.hidden is None:
            begin_hiding(stored, hidden, 2, 14, nothing)
        else:
            change_hidden(stored, stored.hidden, hidden, nothing)
        for layer in (2, 3):
            assert set(rows_of(stored, layer)[:4]) == chosen
            assert sorted(rows_of(stored, layer)) == list(range(18))
            assert rows_of(stored, layer)[14:] == [14, 15, 16, 17]
        assert rows_of(stored, 0) == rows_of(stored, 1) == list(range(18))
        assert stored.hidden is not None
        assert stored.hidden.order.tolist() == rows_of(stored, 3)[:14]


def test_forgetting_everything_forgets_what_was_hidden_and_less_would_be_wrong() -> None:
    stored = filled(10)
    begin_hiding(stored, torch.tensor([1, 2]), 1, 5, torch.zeros(0))
    stored.truncate(5)
    with pytest.raises(ValueError, match="out of order"):
        stored.truncate(4)
    stored.truncate(0)
    assert stored.hidden is None
