"""KV pruning while decoding: the formula, rows that come back, and text that depends on committed tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.unit.models.compression.prompts import cells
from vidspec_models.compression.dycoke import REFRESH_TOKENS, DyCoke
from vidspec_models.compression.hiding import begin_hiding, change_hidden
from vidspec_models.compression.pruner import KVPruner
from vidspec_models.compression.selection import attention_of_row, hidden_by, still_stands
from vidspec_models.cpu_step import CpuStep
from vidspec_models.decoder import Decoder, Segment
from vidspec_models.inputs import NO_CELL, Prompt
from vidspec_models.kv_cache import CacheGeometry, KVCache
from vidspec_models.row_invariance import PREFILL_RULE

GEOMETRY = CacheGeometry(
    num_layers=4, num_kv_heads=2, head_dim=3, dtype=torch.float32, device=torch.device("cpu"), context_block=4
)
LAYERS, TOP, NUM_VIDEO = 5, 2, 300  # enough video rows for a whole block of them to be skipped
DYCOKE = DyCoke(layer=TOP, hide_ratio=0.9)
both_paths = pytest.mark.parametrize("path", ["torch", "compiled"])
TEXT = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(5)).tolist()


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
    """Row i holds i everywhere, plus its layer's hundreds."""
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


def test_the_number_of_hidden_rows_cannot_change() -> None:
    stored = filled(10)
    begin_hiding(stored, torch.tensor([1, 2]), 1, 5, torch.zeros(0))
    assert stored.hidden is not None
    with pytest.raises(ValueError, match="2 rows are hidden"):
        change_hidden(stored, stored.hidden, torch.tensor([3]), torch.zeros(0))


def test_forgetting_everything_forgets_what_was_hidden_and_less_would_be_wrong() -> None:
    stored = filled(10)
    begin_hiding(stored, torch.tensor([1, 2]), 1, 5, torch.zeros(0))
    stored.truncate(5)
    with pytest.raises(ValueError, match="out of order"):
        stored.truncate(4)
    stored.truncate(0)
    assert stored.hidden is None


def prompt_of(num_cells: int, num_newlines: int = 1) -> Prompt:
    grid = torch.cat((cells(0, 1, 1, num_cells), torch.full((num_newlines, 3), NO_CELL)))
    is_video = torch.cat((torch.zeros(4), torch.ones(len(grid)), torch.zeros(6))).bool()
    nothing = torch.zeros(0)
    return Prompt(
        ids=(0,) * len(is_video), embeddings=nothing, rotary=(nothing, nothing), is_video=is_video,
        next_position=len(is_video), grid=grid,
    )  # fmt: skip


def test_only_cells_are_hidden_and_the_papers_share_of_them() -> None:
    pruner = KVPruner.of(prompt_of(100), DyCoke(hide_ratio=0.7), 8)
    assert pruner is not None
    assert pruner.candidates.tolist() == list(range(4, 104))
    assert (pruner.num_hidden, pruner.first_layer, pruner.num_prompt_rows) == (70, 3, 111)


@pytest.mark.parametrize(
    ("num_cells", "dycoke", "num_layers"),
    [(0, DyCoke(), 8), (1, DyCoke(), 8), (100, DyCoke(hide_ratio=0.0), 8), (100, DyCoke(layer=8), 8)],
    ids=["no video", "one cell", "nothing to hide", "no layer to hide it from"],
)
def test_where_there_is_nothing_to_hide_there_is_no_pruner(num_cells: int, dycoke: DyCoke, num_layers: int) -> None:
    assert KVPruner.of(prompt_of(num_cells), dycoke, num_layers) is None


@dataclass(frozen=True)
class Walk:
    """A decoder and one of the ways to compute its steps."""

    decoder: Decoder
    step: Callable[[Sequence[int], Sequence[int], list[Segment]], Tensor]


@cache
def walk(path: str) -> Walk:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=128, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    stock = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if parameter.dim() == 2:  # attention so sharp that choices really change
                parameter.mul_(12.0 if "q_proj" in name or "k_proj" in name else 4.0)
    with torch.inference_mode():
        if path == "torch":
            decoder = Decoder(stock.model, stock.lm_head, 1024)
            return Walk(decoder, decoder.step)
        decoder = Decoder(stock.model, stock.lm_head, 1024, row_rule=PREFILL_RULE)
        return Walk(decoder, CpuStep(stock.model, stock.lm_head, decoder))


@torch.inference_mode()
def forward(made: Walk, stored: KVCache, ids: list[int], pruner: KVPruner | None) -> Tensor:
    start = stored.length
    if pruner is not None:
        pruner.refresh(made.decoder, stored, ids[0], start)
    logits = made.step(ids, range(start, start + len(ids)), [Segment(stored, start, len(ids))])
    stored.length += len(ids)
    return logits.clone()


def started(path: str) -> tuple[Walk, KVCache, KVPruner]:
    """A cache with the prompt in it."""
    made, prompt = walk(path), prompt_of(NUM_VIDEO)
    stored = KVCache(made.decoder.geometry, 400)
    ids = torch.randint(0, 97, (prompt.num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        embedded = made.decoder.embed(torch.tensor(ids))
        made.decoder.forward(embedded, made.decoder.prompt_rotary(len(ids)), [Segment(stored, 0, len(ids))])
    stored.length = len(ids)
    pruner = KVPruner.of(prompt, DYCOKE, LAYERS)
    assert pruner is not None
    return made, stored, pruner


@cache
def alone(path: str) -> Tensor:
    """Logits of every row of the text, one row a forward."""
    made, stored, pruner = started(path)
    return torch.cat([forward(made, stored, [token], pruner) for token in TEXT])


def test_both_ways_to_compute_a_step_leave_out_the_same_rows() -> None:
    compiled, plain = started("compiled")[0], alone("torch")
    _, stored, pruner = started("compiled")
    found = torch.cat([forward(compiled, stored, [token], pruner) for token in TEXT[:REFRESH_TOKENS]])
    assert torch.allclose(found, plain[:REFRESH_TOKENS], atol=1e-2)


@both_paths
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_rows_have_the_bits_they_have_alone_whatever_is_scored_with_them_and_rolled_back(
    path: str, data: st.DataObject
) -> None:
    made, stored, pruner = started(path)
    prompt_rows, at = stored.length, 0
    while at < len(TEXT):
        most = min(pruner.num_rows_left(stored.length), len(TEXT) - at)
        right = data.draw(st.integers(1, most))
        wrong = data.draw(st.integers(0, most - right))
        scored = forward(made, stored, TEXT[at : at + right] + [3] * wrong, pruner)
        stored.truncate(prompt_rows + at + right)
        assert torch.equal(scored[:right], alone(path)[at : at + right])
        at += right


@both_paths
def test_a_resumed_request_gets_the_same_rows_again(path: str) -> None:
    made, stored, pruner = started(path)
    for start in range(0, 64, REFRESH_TOKENS):
        forward(made, stored, TEXT[start : start + REFRESH_TOKENS], pruner)
    assert torch.equal(forward(made, stored, TEXT[64:], pruner), alone(path)[64:])


@both_paths
def test_two_requests_in_turn_do_not_disturb_each_other(path: str) -> None:
    made, one, pruner = started(path)
    _, two, _ = started(path)
    for at in range(40):
        forward(made, two, [TEXT[(at * 7) % 70]], pruner)
        assert torch.equal(forward(made, one, [TEXT[at]], pruner), alone(path)[at : at + 1])


@both_paths
def test_hiding_changes_what_is_computed_and_the_choice_moves_with_the_text(path: str) -> None:
    made, stored, pruner = started(path)
    _, whole, _ = started(path)
    seen = []
    for at, token in enumerate(TEXT):
        left_out, full = forward(made, stored, [token], pruner), forward(made, whole, [token], None)
        assert at > 0 or not torch.allclose(left_out, full, atol=1e-2)
        assert stored.hidden is not None
        seen.append(frozenset(stored.hidden.order[: stored.hidden.count].tolist()))
    for start in range(0, len(TEXT), REFRESH_TOKENS):
        assert len(set(seen[start : start + REFRESH_TOKENS])) == 1
    assert len(set(seen)) > 1


@both_paths
def test_what_is_hidden_is_not_looked_at(path: str) -> None:
    made, stored, pruner = started(path)
    forward(made, stored, TEXT[:5], pruner)
    assert stored.hidden is not None
    start = stored.length
    logits = forward(made, stored, TEXT[5:6], pruner)
    for tensor in (stored.keys, stored.values):
        tensor[TOP:, :, :, : stored.hidden.count] = 1e3  # were they looked at, nothing would stay the same
    stored.truncate(start)
    assert torch.equal(forward(made, stored, TEXT[5:6], pruner), logits)


def test_refreshing_before_the_prompt_is_there_is_a_mistake() -> None:
    made, _, pruner = started("torch")
    with pytest.raises(ValueError, match="whole prompt"):
        pruner.refresh(made.decoder, KVCache(made.decoder.geometry, 10), 0, 0)
