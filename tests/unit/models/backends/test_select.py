"""Which path a model's steps take, and that int8 has the same numbers on each."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.unit.models.random_models import build
from vidspec_models.backends import select
from vidspec_models.backends.select import make_decoder
from vidspec_models.decoder.build import build_decoder
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.int8 import fake_quantise, language_linears, layer_linears, widen
from vidspec_models.decoder.kv_cache import KVCache, LayerSpan
from vidspec_models.decoder.quantised import Quantised, make_plain, set_quantised
from vidspec_models.errors import ModelLoadError
from vidspec_models.step_path import COMPILED_INT8

pytestmark = pytest.mark.unit

NUM_ROWS = 40


paths = pytest.mark.parametrize(
    ("num_heads", "flags", "has_kernels", "has_layers"),
    [
        (4, {"avx2"}, True, False),
        (4, set(), True, True),  # prompts are torch's
        (8, {"avx2"}, False, True),  # there are no kernels for heads of width 16
    ],
)


@pytest.mark.parametrize("is_tied", [True, False])
@paths
def test_int8_has_the_same_numbers_from_16_bits_as_from_32(
    is_tied: bool,
    num_heads: int,
    flags: set[str],
    has_kernels: bool,
    has_layers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(flags, monkeypatch)
    model = build(
        "qwen2", hidden_size=128, intermediate_size=192, num_attention_heads=num_heads, tie_word_embeddings=is_tied
    ).bfloat16()
    rounded = deepcopy(model).float()
    widen(model, leaving=language_linears(model.model, model.lm_head))
    fake_quantise(language_linears(rounded.model, rounded.lm_head))
    (decoder, step), (same, _) = (in_int8(each) for each in (model, rounded))
    assert (step is not None) is has_kernels
    assert bool(decoder.weights.layers) is has_layers
    assert (decoder.step_path == COMPILED_INT8) is has_kernels
    assert torch.equal(last_logits(decoder), last_logits(same))
    if step is not None:
        cache = KVCache(decoder.geometry, 8)
        found = step([1, 2, 3], range(3), [Segment(cache, 0, 3)])
        assert torch.allclose(found[-1:], last_logits(decoder, 3), atol=0.05)


@paths
def test_a_quantised_model_has_its_own_numbers_on_each_path(
    num_heads: int, flags: set[str], has_kernels: bool, has_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(flags, monkeypatch)
    model = build("qwen2", hidden_size=128, intermediate_size=256, num_attention_heads=num_heads)
    for linear in layer_linears(model.model):
        numbers = torch.randint(16, linear.weight.shape, dtype=torch.uint8)
        grid = torch.full((len(linear.weight), linear.in_features // 128), 8)
        shape = (len(numbers), linear.in_features)
        set_quantised(linear, Quantised(shape, numbers.__getitem__, 0.01 + 0 * grid, grid, 128, bits=4))
        linear.weight.data = torch.zeros(1).expand(linear.weight.shape)  # as after loading
    plain = deepcopy(model)
    for linear in layer_linears(plain.model):
        make_plain(linear, torch.float32)
    fake_quantise([plain.lm_head])
    wanted = last_logits(build_decoder(plain.model, plain.lm_head, 64))
    decoder, step = in_int8(model)
    assert (step is not None) is has_kernels
    assert bool(decoder.weights.layers) is has_layers
    assert wanted.std() > 0.5
    # kernels round rows, torch does not
    assert torch.allclose(last_logits(decoder), wanted, atol=1e-4 if has_layers else 0.1)


def test_rows_that_are_not_whole_blocks_are_refused_before_anything_is_made(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelLoadError, match="but one is 96"):
        in_int8(build("qwen2", hidden_size=128, intermediate_size=96))
    assert not caplog.records


def pretend(flags: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has no other instructions, as far as the choice of a path is concerned."""
    for flag in ("avx2", "avx512"):
        monkeypatch.setattr(torch.cpu, f"_is_{flag}_supported", lambda has=flag in flags: has)
    monkeypatch.setattr(select, "attends_in_bfloat16", lambda: False)


def in_int8(model: Any) -> Any:
    spans = [LayerSpan(torch.device("cpu"), range(len(model.model.layers)))]
    return make_decoder(model.model, model.lm_head, model.config, spans, is_int8=True)


@torch.inference_mode()
def last_logits(decoder: Decoder, num_rows: int = NUM_ROWS) -> torch.Tensor:
    """Logits [1, V] after a prompt of the tokens 1, 2, ..."""
    cache = KVCache(decoder.geometry, num_rows)
    hidden, rotary = decoder.weights.rows(torch.arange(1, num_rows + 1), torch.arange(num_rows))
    return decoder.prompts.logits(decoder.prompts.prefill(hidden, rotary, Segment(cache, 0, num_rows)))
