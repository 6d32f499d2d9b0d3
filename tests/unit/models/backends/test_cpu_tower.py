"""The compiled tower against transformers and against itself: equal features; other frames change no bit."""

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LlavaOnevisionConfig, LlavaOnevisionModel, Qwen2Config, SiglipVisionConfig
from transformers import LlavaOnevisionForConditionalGeneration as Model

from vidspec_models.backends.cpu import packing
from vidspec_models.backends.cpu.tower import CompiledLinear, compile_tower, pooled
from vidspec_models.core_share import CoreShare
from vidspec_models.decoder.int8 import compute_in_int8, vision_linears
from vidspec_models.decoder.placement import has_avx512_bf16

pytestmark = pytest.mark.unit


LAYER, PROJECTOR = "SiglipEncoderLayer", "LlavaOnevisionMultiModalProjector"


def build(
    *,
    side: int = 6,
    dtype: torch.dtype = torch.float32,
    text_size: int = 32,
    projector_act: str = "gelu",
    **vision: Any,
) -> Model:
    """A model with side x side patches per frame."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(image_size=8 * side, patch_size=8, vision_use_head=False, **(sizes | vision)),
        text_config=Qwen2Config(
            hidden_size=text_size, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, vocab_size=32
        ),
        vision_feature_layer=-1,
        projector_hidden_act=projector_act,
    )
    model = Model(config).to(dtype).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return model


@torch.inference_mode()
def features(model: Model, frames: Tensor) -> Tensor:
    found: Tensor = model.get_video_features(frames[None].to(model.dtype)).pooler_output.float()
    return found


def compiled(model: Model, *, is_int8: bool = False) -> Model:
    other = copy.deepcopy(model)
    compile_tower(other, CoreShare(), is_int8=is_int8)
    return other


def replaced(model: Model) -> set[str]:
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


# Heads and an MLP that are no whole strips, as in the tower of the released checkpoints, where they have 72 and 4304.
ODD = {"hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 100}


@pytest.mark.parametrize("vision", [{}, ODD, {"num_attention_heads": 8}], ids=str)
@pytest.mark.parametrize("side", [4, 6, 10])  # rows: less than a strip; more than one strip; more than one batch
def test_features_are_those_of_the_modules(side: int, vision: dict[str, Any]) -> None:
    model, frames = build(side=side, **vision), torch.randn(3, 3, 8 * side, 8 * side)
    other = compiled(model)
    assert replaced(other) == {LAYER, PROJECTOR}
    wanted = features(model, frames)
    assert torch.allclose(features(other, frames), wanted, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.skipif(not has_avx512_bf16(), reason="this processor does not multiply bfloat16")
@pytest.mark.parametrize("vision", [{}, ODD], ids=str)
def test_in_bfloat16_they_are_as_near_as_rounding_lets_them_be(vision: dict[str, Any]) -> None:
    model, frames = build(dtype=torch.bfloat16, **vision), torch.randn(3, 3, 48, 48)
    exact = features(copy.deepcopy(model).float(), frames)
    other = compiled(model)
    assert replaced(other)
    errors = [float((features(each, frames) - exact).abs().mean()) for each in (other, model)]
    assert 0 < errors[0] <= errors[1]


def test_in_int8_they_are_those_of_rounded_weights_and_rows() -> None:
    model, frames = build(intermediate_size=128, text_size=64), torch.randn(3, 3, 48, 48)
    exact, (found, wanted) = features(model, frames), (features(each, frames) for each in in_int8(model))
    errors = [float((each - wanted).abs().mean() / wanted.abs().mean()) for each in (found, exact)]
    assert errors[0] < errors[1] / 2
    assert errors[0] < 0.01  # numbers halfway between two of 127 steps round either way


@torch.inference_mode()
def test_in_int8_an_mlp_of_any_width_is_that_of_rounded_weights_and_rows() -> None:
    model, rows = build(text_size=96), torch.randn(2, 5, 64)
    exact, (found, wanted) = (
        model.model.multi_modal_projector(rows),
        (each.model.multi_modal_projector(rows) for each in in_int8(model)),
    )
    errors = [float((each - wanted).abs().mean() / wanted.abs().mean()) for each in (found, exact)]
    assert errors[0] < errors[1] / 10


def in_int8(model: Model) -> tuple[Model, Model]:
    """The kernels with rounded weights, and transformers' modules that also round their rows."""
    model = copy.deepcopy(model)
    compute_in_int8(vision_linears(model))
    rounded = copy.deepcopy(model)
    for module in rounded.modules():
        module._forward_pre_hooks.clear()
    return compiled(rounded, is_int8=True), model


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(5,), (600,), (3, 7)], ids=str)  # some threads get no rows; two get some; two axes
@pytest.mark.parametrize("bias", [True, False])
def test_any_other_linear_layer_is_computed_in_int8_by_itself(shape: tuple[int, ...], bias: bool) -> None:
    linear, rows = torch.nn.Linear(70, 50, bias=bias), torch.randn(*shape, 70)
    exact = linear(rows)
    compute_in_int8([linear])
    wanted = linear(rows)
    found = CompiledLinear(linear, CoreShare())(rows)
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().mean()) < float((exact - wanted).abs().mean()) / 10
    assert torch.equal(CompiledLinear(linear, CoreShare())(rows[-1:]), found[-1:]), "bits do not depend on other rows"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_frames_bits_depend_neither_on_other_frames_nor_on_threads(num_threads: int) -> None:
    model, frames = compiled(build()), torch.randn(5, 3, 48, 48)
    rows = features(model, frames)[0, :45].unflatten(0, (5, -1))  # transformers 5.23 appends one more row
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(features(model, frames[3:4])[0, :9], rows[3])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"hidden_size": 48}, set()),
        ({"hidden_act": "gelu"}, {PROJECTOR}),
        ({"text_size": 40}, {LAYER}),
        ({"projector_act": "relu"}, {LAYER}),
        ({"dtype": torch.float16}, set()),
    ],
    ids=str,
)
def test_layers_that_no_kernel_is_for_stay_as_they_are(sizes: dict[str, Any], found: set[str]) -> None:
    model, frames = build(**sizes), torch.randn(2, 3, 48, 48)
    other = compiled(model)
    assert replaced(other) == found
    assert torch.allclose(features(other, frames), features(model, frames), atol=1e-4)


def test_in_int8_layers_whose_rows_are_no_whole_blocks_are_computed_product_by_product() -> None:
    model, frames = build(hidden_size=96, intermediate_size=128), torch.randn(2, 3, 48, 48)
    assert replaced(compiled(model)) == {LAYER, PROJECTOR}
    found, wanted = in_int8(model)
    assert replaced(found) == {"Linear"}
    exact, found, wanted = (features(each, frames) for each in (model, found, wanted))
    assert (found - wanted).abs().mean() < (exact - wanted).abs().mean() / 2


def test_large_layers_stay_as_they_are_where_torch_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(text_size=64)
    monkeypatch.setattr(packing, "attends_in_bfloat16", lambda: False)
    for limit in ("_FEW_WEIGHTS", "_FEW_WEIGHTS_OF_AVX512"):
        monkeypatch.setattr(packing, limit, 10_000)
    assert replaced(compiled(model)) == {PROJECTOR}
    assert LAYER in replaced(compiled(model, is_int8=True))


@pytest.mark.parametrize("side", [1, 4, 16, 27])
def test_cells_are_pooled_as_transformers_does_it(side: int) -> None:
    rows = torch.randn(3, side * side, 40, generator=torch.Generator().manual_seed(side))
    patches = SimpleNamespace(vision_config=SimpleNamespace(image_size=side, patch_size=1))
    stock = LlavaOnevisionModel.apply_pooling(cast(Any, SimpleNamespace(config=patches)), rows)
    assert torch.allclose(pooled(rows), stock, atol=1e-6)
