"""Weights that a GPU keeps in eight bits: products have the bits of the converted weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.unit.models.decoder.test_decoder import run
from tests.unit.models.random_models import build
from vidspec_models.decoder.build import LayersAre, build_decoder
from vidspec_models.decoder.decoder import Decoder
from vidspec_models.decoder.int8 import BLOCK, layer_linears
from vidspec_models.decoder.int8_weight import int8_weight
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.decoder.measure_invariance import PREFILL_ONLY
from vidspec_models.decoder.placement import Precision
from vidspec_models.decoder.quantised import quantised_weight, round_to_four_bits
from vidspec_models.reference.stock import round_weights

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")
IN_EIGHT_BITS = Precision(torch.bfloat16, is_int8=True)


def small(*, is_tied: bool = False) -> Any:
    return build("qwen2", hidden_size=128, intermediate_size=192, tie_word_embeddings=is_tied).bfloat16()


@torch.inference_mode()
def logits(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    return run(decoder, KVCache(decoder.geometry, 64), ids)


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_decoder_has_the_logits_of_the_rounded_model(is_tied: bool, is_quantised: bool) -> None:
    """With a checkpoint's own integers, too."""
    model, embedding = small(is_tied=is_tied), small(is_tied=is_tied).model.embed_tokens.weight
    if is_quantised:
        round_to_four_bits(layer_linears(model.model), BLOCK)
    plain, stock = deepcopy(model), deepcopy(model)
    round_weights(stock.model, stock.lm_head, IN_EIGHT_BITS)
    assert torch.equal(stock.model.embed_tokens.weight, embedding)
    cases: list[tuple[Any, LayersAre]] = [(model, "rounded to int8"), (stock, "moved"), (plain, "copied")]
    found, wanted, other = (
        build_decoder(each.model, each.lm_head, 64, batch_invariance=PREFILL_ONLY, layers_are=how)
        for each, how in cases
    )
    assert found.weights.layers[0].down.weight.integers.dtype is torch.int8
    assert torch.equal(logits(found, [1, 2, 3, 4]), logits(wanted, [1, 2, 3, 4]))
    assert not torch.equal(logits(found, [1, 2, 3, 4]), logits(other, [1, 2, 3, 4]))
    assert not [*model.model.layers.parameters()]


def test_integers_of_a_quantised_weight_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of rows is converted at once."""
    model = small()
    linears = [*layer_linears(model.model)][:3]
    round_to_four_bits(linears, BLOCK)
    whole = int8_weight(linears, CPU)
    stored = [weight.weights(torch.float32) for linear in linears if (weight := quantised_weight(linear))]
    assert torch.equal(whole.converted(torch.float32), torch.cat(stored))
    assert whole.integers.unique().numel() <= 31
    monkeypatch.setattr("vidspec_models.decoder.int8_weight._ROWS_AT_ONCE", 8)
    assert torch.equal(int8_weight(linears, CPU).integers, whole.integers)
