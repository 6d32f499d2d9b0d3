"""Eight-bit weights: their error, and that rounding them again changes nothing."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.unit.models.random_models import build
from vidspec_models.decoder.int8 import (
    BLOCK,
    compute_in_int8,
    dequantise,
    fake_quantise,
    fake_quantise_rows,
    language_linears,
    quantise,
    widen,
)

pytestmark = pytest.mark.unit


@given(seed=st.integers(0, 2**32 - 1), magnitude=st.floats(1e-20, 1e20))
def test_a_weight_is_half_a_step_off_at_most_and_is_rounded_once(seed: int, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 2 * BLOCK, generator=generator) * magnitude
    integers, scales = quantise(weight)
    rounded = dequantise(integers, scales)
    steps = scales.repeat_interleave(BLOCK, dim=-1)
    assert ((rounded - weight).abs() <= steps * 0.76).all()  # half a step, plus the rounding of the 8-bit scale
    again, same = quantise(rounded)
    assert torch.equal(again, integers)
    assert torch.equal(same, scales)


@given(seed=st.integers(0, 2**32 - 1), magnitude=st.floats(1e-20, 1e20))
def test_a_rows_number_is_half_a_step_of_its_block_off_at_most(seed: int, magnitude: float) -> None:
    rows = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(seed)) * magnitude
    steps = rows.unflatten(-1, (2, BLOCK)).abs().amax(-1).repeat_interleave(BLOCK, dim=-1) / 127
    assert ((fake_quantise_rows(rows) - rows).abs() <= steps * 0.501).all()
    assert not torch.equal(fake_quantise_rows(rows), rows)


def test_a_last_block_of_fewer_numbers_has_a_scale_of_its_own() -> None:
    linear = nn.Linear(BLOCK + 6, 3)
    rows = torch.randn(2, BLOCK + 6)
    whole, last = linear.weight.detach()[:, :BLOCK].clone(), linear.weight.detach()[:, BLOCK:].clone()
    wanted = torch.cat([fake_quantise_rows(rows[:, :BLOCK]), fake_quantise_rows(rows[:, BLOCK:])], dim=1)
    assert torch.equal(fake_quantise_rows(rows), wanted)
    fake_quantise([linear])
    assert torch.equal(linear.weight[:, :BLOCK], dequantise(*quantise(whole)))
    assert torch.equal(linear.weight[:, BLOCK:], dequantise(*quantise(last))[:, :6])


def test_a_block_of_zeros_stays_one() -> None:
    assert torch.equal(fake_quantise_rows(torch.zeros(2, BLOCK)), torch.zeros(2, BLOCK))
    integers, scales = quantise(torch.zeros(2, BLOCK))
    assert not integers.any()
    assert torch.equal(dequantise(integers, scales), torch.zeros(2, BLOCK))


def test_every_product_of_a_model_is_rounded_and_nothing_else() -> None:
    model = build("qwen2", hidden_size=128, intermediate_size=192)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    fake_quantise(language_linears(model.model, model.lm_head))
    unrounded = {"model.embed_tokens.weight"}  # separate from the head here
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name, parameter in before.items() if parameter.ndim == 2} - unrounded


def test_weights_in_16_bits_are_rounded_to_the_same_numbers_which_need_more() -> None:
    model = build("qwen2", hidden_size=128, intermediate_size=192).bfloat16()
    same = deepcopy(model).float()
    for each in (model, same):
        fake_quantise(language_linears(each.model, each.lm_head))
    for one, other in zip(*(language_linears(each.model, each.lm_head) for each in (model, same)), strict=True):
        assert torch.equal(one.weight, other.weight)
        assert not torch.equal(one.weight, one.weight.bfloat16().float())


@pytest.mark.parametrize("is_tied", [True, False])
def test_all_weights_but_those_that_only_products_have_are_widened(is_tied: bool) -> None:
    model = build("qwen2", tie_word_embeddings=is_tied).bfloat16()
    before = deepcopy(model)
    widen(model, leaving=language_linears(model.model, model.lm_head))
    for name, parameter in model.named_parameters():
        is_left = "_proj" in name or (name == "lm_head.weight" and not is_tied)
        assert parameter.dtype is (torch.bfloat16 if is_left else torch.float32)
        assert torch.equal(parameter, before.get_parameter(name).to(parameter.dtype))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is is_tied


def test_transformers_computes_with_rounded_rows_too() -> None:
    model, same = (build("qwen2", hidden_size=128, intermediate_size=192) for _ in range(2))
    rows = torch.randn(5, 128)
    compute_in_int8(language_linears(model.model, model.lm_head))
    fake_quantise(language_linears(same.model, same.lm_head))
    for one, other in (
        (model.lm_head, same.lm_head),
        (model.model.layers[0].mlp.up_proj, same.model.layers[0].mlp.up_proj),
    ):
        assert torch.equal(one(rows), other(fake_quantise_rows(rows)))
        assert not torch.equal(one(rows), other(rows))
