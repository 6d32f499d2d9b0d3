"""KV pruning while decoding: which rows a request hides; the text depends on committed tokens only."""

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
from vidspec_models.backends.cpu.step import CpuStep
from vidspec_models.compression import REFRESH_TOKENS, DyCoke
from vidspec_models.compression.dycoke import KVPruner, change_hidden
from vidspec_models.decoder.build import build_decoder
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.decoder.measure_invariance import PREFILL_ONLY
from vidspec_models.decoder.torch_runner import TorchRunner
from vidspec_models.prompt import NO_CELL, Prompt

LAYERS, TOP, NUM_VIDEO = 5, 2, 300  # enough video rows to skip a whole block
DYCOKE = DyCoke(layer=TOP, hide_ratio=0.9)
both_paths = pytest.mark.parametrize("path", ["torch", "compiled"])
TEXT = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(5)).tolist()


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
    """A decoder with one of the implementations of its steps."""

    decoder: Decoder
    step: Callable[[Sequence[int], Sequence[int], list[Segment]], Tensor]


def random_qwen2() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=128, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    stock = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            if parameter.dim() == 2:  # sharp attention, so that choices change
                parameter.mul_(12.0 if "q_proj" in name or "k_proj" in name else 4.0)
    return stock


@cache
def walk(path: str) -> Walk:
    stock = random_qwen2()
    with torch.inference_mode():
        if path == "torch":
            decoder = build_decoder(stock.model, stock.lm_head, 1024)
            return Walk(decoder, decoder.step)
        decoder = build_decoder(stock.model, stock.lm_head, 1024, batch_invariance=PREFILL_ONLY)
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
    """A decoder, and a cache and a pruner after the prompt."""
    made, prompt = walk(path), prompt_of(NUM_VIDEO)
    stored = KVCache(made.decoder.geometry, 400)
    ids = torch.randint(0, 97, (prompt.num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        embedded = made.decoder.embedding[torch.tensor(ids)]
        TorchRunner(made.decoder).forward(
            embedded, made.decoder.prompt_rotary(len(ids)), [Segment(stored, 0, len(ids))]
        )
    stored.length = len(ids)
    pruner = KVPruner.of(prompt, DYCOKE, LAYERS)
    assert pruner is not None
    return made, stored, pruner


@cache
def alone(path: str) -> Tensor:
    """Logits of every row of the text, computed one row per forward."""
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
    assert stored.hidden is not None
    order = stored.hidden.order
    for moved, original in ((stored.keys, whole.keys), (stored.values, whole.values)):
        assert torch.equal(moved[TOP:, :, :, : len(order)], original[TOP:, :, :, order])


def test_a_choice_stays_while_the_attention_is_like_the_one_that_made_it() -> None:
    made, stored, pruner = started("torch")
    pruner.refresh(made.decoder, stored, TEXT[0], stored.length)
    state = stored.hidden
    assert state is not None
    chosen, attention = state.order[: state.count].tolist(), state.attention
    others = [row for row in pruner.candidates.tolist() if row not in chosen]
    different = torch.tensor(sorted([*others, *chosen][: state.count]))
    for made_by, expected in ((attention, different.tolist()), (-attention, chosen)):
        change_hidden(stored, state, different, made_by)
        pruner.refresh(made.decoder, stored, TEXT[0], stored.length)
        assert sorted(state.order[: state.count].tolist()) == sorted(expected)
    assert torch.equal(state.attention, attention)


@both_paths
def test_what_is_hidden_is_not_looked_at(path: str) -> None:
    made, stored, pruner = started(path)
    forward(made, stored, TEXT[:5], pruner)
    assert stored.hidden is not None
    start = stored.length
    logits = forward(made, stored, TEXT[5:6], pruner)
    for tensor in (stored.keys, stored.values):
        tensor[TOP:, :, :, : stored.hidden.count] = 1e3  # reading hidden rows would change every result
    stored.truncate(start)
    assert torch.equal(forward(made, stored, TEXT[5:6], pruner), logits)
