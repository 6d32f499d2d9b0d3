"""Which quantised weights int8 can take as they are, and what four bits make of a weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vidspec_models.decoder.int8 import BLOCK, dequantise
from vidspec_models.decoder.quantised import Quantised, quantised_weight, round_to_four_bits, set_quantised

pytestmark = pytest.mark.unit


def weight(
    numbers: Tensor, zero: int | None, bits: int = 8, width: int = 64, groups: Tensor | None = None
) -> Quantised:
    grid = torch.ones(len(numbers), -(-numbers.shape[1] // width))
    zeros = None if zero is None else (zero * grid).int()
    return Quantised((len(numbers), numbers.shape[1]), numbers.__getitem__, 0.5 * grid, zeros, width, groups, bits)


UNSIGNED, SIGNED = (
    torch.arange(256).to(torch.uint8).reshape(2, 128),
    torch.arange(-128, 128).to(torch.int8).reshape(2, 128),
)


@pytest.mark.parametrize(
    "found",
    [
        weight(UNSIGNED, 128),
        weight(SIGNED, None),
        weight(SIGNED, 0),
        weight(UNSIGNED % 16, 0, bits=4),
        weight(UNSIGNED % 16, 16, bits=4, width=128),
        weight(UNSIGNED.repeat(1, 2)[:, :192] % 16, 8, bits=4, width=128),
    ],
)
def test_integers_that_eight_bits_hold_are_taken_as_they_are(found: Quantised) -> None:
    assert found.has_integers(BLOCK)
    assert torch.equal(dequantise(*found.integers(BLOCK)), found.weights(torch.float32))


@pytest.mark.parametrize(
    "found",
    [
        weight(UNSIGNED, 127),
        weight(UNSIGNED, 129),
        weight(UNSIGNED, None),
        weight(SIGNED, 1),
        weight(SIGNED, -1),
        weight(UNSIGNED % 16, 8, bits=4, width=32),
        weight(UNSIGNED % 16, 8, bits=4, width=96),
        weight(UNSIGNED[:, :96] % 16, 8, bits=4),
        weight(UNSIGNED % 16, 8, bits=4, groups=torch.zeros(128).int()),
        weight(SIGNED.to(torch.float8_e4m3fn), None),
    ],
)
def test_numbers_that_eight_bits_do_not_hold_or_with_other_groups_are_not(found: Quantised) -> None:
    assert not found.has_integers(BLOCK)


def test_some_rows_are_those_of_the_whole() -> None:
    whole = weight(torch.randint(16, (40, 128)).to(torch.uint8), 7, bits=4)
    assert torch.equal(whole[16:40][8:].weights(torch.float32), whole.weights(torch.float32)[24:])
    assert torch.equal(whole[8:40][8:16].weights(torch.float32), whole.weights(torch.float32)[16:24])
    assert whole[32:64].shape == (8, 128)


def test_a_weight_of_four_bits_is_near_the_weight_and_keeps_zeros() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 40, bias=False)
    with torch.no_grad():
        linear.weight[0, :64] = 0.25 * (torch.arange(64) % 16 - 5)  # what four bits hold
        linear.weight[3] = 0.0
        linear.weight[5, 64:128] = linear.weight[5, 64:128].abs() + 1.0  # all on one side of 0
        linear.weight[6, 64:128] = -linear.weight[5, 64:128]
        linear.weight[:, 7] = 0.0
    round_to_four_bits([linear], BLOCK)
    found = quantised_weight(linear)
    assert found is not None
    assert found.has_integers(BLOCK)
    assert int(found.numbers(slice(0, 40)).max()) == 15
    rounded = found.weights(torch.float32)
    steps = found.scales.repeat_interleave(BLOCK, 1)
    errors = (rounded - linear.weight).abs() / steps
    assert (errors <= 0.52).float().mean() > 0.98  # a scale has eight bits
    assert (errors <= 1.02).all()  # the zero is rounded, too, and then a group's end may be beyond the last number
    assert not rounded[3].any()
    assert not rounded[:, 7].any()
    assert torch.equal(rounded[0, :64], linear.weight[0, :64])
    assert len(rounded[0, :64].unique()) == 16
    round_to_four_bits([linear], BLOCK)
    assert quantised_weight(linear) is found  # what is quantised stays as it is


@pytest.mark.parametrize(
    "stored",
    [
        weight(SIGNED, None),
        weight(UNSIGNED, 128),
        weight(SIGNED.to(torch.float8_e4m3fn), None),
        weight(UNSIGNED % 16, 8, bits=4, width=32),
        weight(UNSIGNED % 16, 8, bits=4, groups=torch.arange(128).int() % 2),
    ],
)
def test_what_a_checkpoint_has_in_other_bits_or_groups_is_rounded_to_four_bits_as_a_plain_weight(
    stored: Quantised,
) -> None:
    plain, quantised = nn.Linear(128, 2, bias=False), nn.Linear(128, 2, bias=False)
    with torch.no_grad():
        plain.weight.copy_(stored.weights(torch.float32))
    set_quantised(quantised, stored)
    round_to_four_bits([plain, quantised], BLOCK)
    wanted, found = quantised_weight(plain), quantised_weight(quantised)
    assert wanted is not None
    assert found is not None
    assert found.bits == 4
    assert found.has_integers(BLOCK)
    assert torch.equal(found.weights(torch.float32), wanted.weights(torch.float32))
