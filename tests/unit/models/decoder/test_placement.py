"""Which device gets which layers: balanced shares, every layer once, a readable error for an impossible list."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.unit.models.families.tiny_checkpoints import FAMILIES, save
from vidspec_models.decoder import placement
from vidspec_models.decoder.kv_cache import KVCache, LayerSpan
from vidspec_models.decoder.placement import (
    Precision,
    layer_spans,
    layers_per_device,
    move_to_devices,
    resolve_device,
    resolve_devices,
    resolve_precision,
)
from vidspec_models.errors import ModelLoadError
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import BUNDLED, BUNDLED_TARGET_NAME, ModelSpec, model_path, rounded_dtype
from vidspec_models.request import Turn
from vidspec_models.synthetic.recipe import Recipe, prompt_text

CPU, META = torch.device("cpu"), torch.device("meta")
BYTES = st.integers(0, 60)


def model_of(num_layers: int, *, is_tied: bool) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=is_tied,
        )
    )  # fmt: skip


@given(num_devices=st.integers(1, 4), more=st.integers(0, 6), layer=st.integers(1, 20), before=BYTES, behind=BYTES)
def test_no_other_share_has_a_smaller_largest_part(
    num_devices: int, more: int, layer: int, before: int, behind: int
) -> None:
    num_layers = num_devices + more

    def largest(counts: tuple[int, ...]) -> int:
        held = [count * layer for count in counts]
        held[0] += before
        held[-1] += behind
        return max(held)

    counts = tuple(layers_per_device(num_layers, layer, before, behind, num_devices))
    assert sum(counts) == num_layers
    assert min(counts) >= 1
    every = itertools.product(range(1, num_layers + 1), repeat=num_devices)
    assert largest(counts) == min(largest(other) for other in every if sum(other) == num_layers)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_every_layer_has_one_place_and_the_ends_count_what_lies_there(num_devices: int, is_tied: bool) -> None:
    model = model_of(9, is_tied=is_tied)
    spans = layer_spans(model, model.model, model.lm_head, [CPU] * num_devices)
    assert [index for span in spans for index in span.layers] == list(range(9))
    layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    ends = model.lm_head.weight.nbytes  # equals the embedding; the last device has its own copy
    held = [len(span.layers) * layer for span in spans]
    held[0] += ends
    held[-1] += ends
    assert max(held) - min(held) <= layer


def test_a_device_named_twice_has_two_places() -> None:
    model = model_of(4, is_tied=False)
    spans = layer_spans(model, model.model, model.lm_head, (CPU, CPU))
    assert spans == (LayerSpan(CPU, range(2)), LayerSpan(CPU, range(2, 4)))


def test_as_many_devices_as_layers_have_one_each() -> None:
    model = model_of(2, is_tied=False)
    spans = layer_spans(model, model.model, model.lm_head, (CPU, CPU))
    assert [len(span.layers) for span in spans] == [1, 1]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("is_int8", [False, True])
def test_layers_and_head_never_come_to_the_first_device_on_their_way_to_another(name: str, is_int8: bool) -> None:
    """Nor, if they are to be rounded, to a single one."""
    model, _ = FAMILIES[name]()
    language_model, head = model.model.language_model, model.lm_head
    layers, is_tied = language_model.layers, head.weight is language_model.embed_tokens.weight
    spans = layer_spans(model, language_model, head, (META,) if is_int8 else (META, CPU))
    move_to_devices(model, language_model, spans, is_int8=is_int8)
    assert language_model.layers is layers
    assert model.lm_head is head
    assert {weight.device for weight in layers.parameters()} == {CPU}
    assert language_model.embed_tokens.weight.device == META
    assert is_tied or head.weight.device == CPU
    outside = {id(weight) for weight in (*layers.parameters(), *head.parameters())}
    assert {weight.device for weight in model.parameters() if id(weight) not in outside} == {META}


def test_more_devices_than_layers_are_one_readable_error(tmp_path: Path) -> None:
    save("llava_onevision", tmp_path)
    with pytest.raises(ModelLoadError, match="4 devices for a model of 3 layers: name at most 3"):
        load_model(ModelSpec(role="target", path=str(tmp_path), device="cpu,cpu,cpu,cpu", dtype="float32"))


def test_a_random_model_is_spread_as_any_other(tmp_path: Path) -> None:
    Recipe(pair="tiny", role="target").write(tmp_path)
    found = []
    for devices in ("cpu", "cpu,cpu"):
        model = load_model(ModelSpec(role="target", path=str(tmp_path), device=devices, dtype="float32"))
        prompt = model.prepare([Turn(role="user", parts=(prompt_text(0),))], [])
        logits = model.prefill(prompt, KVCache(model.decoder.geometry, prompt.num_tokens), prompt.num_tokens)
        assert logits is not None
        found.append(logits)
        assert model.decoder.geometry.device_names == devices
    assert torch.allclose(found[0], found[1], atol=1e-4)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("cuda:98,cuda:99", "device 'cuda:98' does not exist; CUDA devices found: "),
        ("cpu,", "device '' is not one of cpu, cuda, cuda:N"),
        ("cpu,gpu", "device 'gpu' is not one of cpu, cuda, cuda:N"),
    ],
)
def test_a_device_that_cannot_be_is_one_readable_error(names: str, message: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        resolve_devices(names, "target")
    assert message in str(error.value)


def test_devices_of_two_kinds_hold_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device) for device in resolve_devices("cuda:1,cuda:0", "target")] == ["cuda:1", "cuda:0"]
    with pytest.raises(ModelLoadError, match="not on both"):
        resolve_devices("cpu,cuda:0", "target")


def test_devices_are_counted_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ModelLoadError, match="'cuda:2' does not exist; CUDA devices found: 2"):
        resolve_devices("cuda:1,cuda:2", "target")
    assert resolve_devices("cuda", "target") == (torch.device("cuda", 0),), "a device has one name: names are compared"


def test_auto_is_one_device_whatever_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, target, draft in ((0, "cpu", "cpu"), (1, "cuda:0", "cuda:0"), (3, "cuda:2", "cuda:0")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert [str(resolve_devices("auto", role)[0]) for role in ("target", "draft")] == [target, draft]
        assert len(resolve_devices("auto", "target")) == 1


def test_stock_transformers_says_that_it_takes_one_device() -> None:
    with pytest.raises(ModelLoadError, match="runs on one device here, not on 'cpu,cpu'"):
        resolve_device("cpu,cpu", "target")


@pytest.mark.parametrize(
    ("flags", "rounded", "expected"),
    [
        ({"avx2"}, "int8", "int8"),
        ({"avx2"}, None, "float32"),
        ({"avx2", "avx512"}, "int4", "int4"),
        ({"avx2", "avx512", "avx512_bf16"}, "int8", "int8"),
        ({"avx2", "avx512", "avx512_bf16"}, None, "float32"),
        ({"avx2", "avx512", "avx512_bf16", "amx_tile"}, "int8", "bfloat16"),
        ({"avx2", "avx512", "avx512_bf16", "amd"}, "int8", "int8"),
        ({"avx2", "avx512", "avx512_bf16", "amd"}, None, "bfloat16"),
        ({"avx2", "amd"}, "int4", "int4"),
        (set(), "int8", "float32"),
    ],
)
def test_auto_is_what_the_processor_is_known_to_be_fast_in(
    flags: set[str], rounded: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in ("avx2", "avx512", "avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{flag}_supported", lambda has=flag in flags: has)
    monkeypatch.setattr(placement, "_is_from_amd", lambda: "amd" in flags)
    found = resolve_precision("auto", torch.device("cpu"), rounded_dtype=rounded)
    assert found.name == expected
    assert found.dtype is (torch.bfloat16 if expected == "bfloat16" else torch.float32)


def test_a_named_type_is_taken_whatever_the_processor() -> None:
    assert resolve_precision("float32", torch.device("cpu"), rounded_dtype="int8").name == "float32"
    for name in ("int8", "int4"):
        assert resolve_precision(name, torch.device("cpu")).is_int8
        assert resolve_precision(name, torch.device("cpu")).name == name
    assert resolve_precision("int8", torch.device("cuda")) == Precision(torch.bfloat16, is_int8=True)
    with pytest.raises(ModelLoadError, match=r"int4 weights need a CPU.*choose int8"):
        resolve_precision("int4", torch.device("cuda"))
    for name in ("int2", "float8_e4m3fn", "float64", "empty"):
        with pytest.raises(ModelLoadError, match="not one of auto"):
            resolve_precision(name, torch.device("cpu"))


def test_only_checkpoints_that_were_measured_are_rounded_unasked() -> None:
    for path, role, dtype in (
        (BUNDLED, "target", "int8"),
        (BUNDLED, "draft", "int4"),
        (BUNDLED_TARGET_NAME, "draft", "int8"),
    ):
        assert rounded_dtype(model_path(ModelSpec(path=path, role=role))) == dtype
    assert rounded_dtype(model_path(ModelSpec(path="Qwen/Qwen2-VL-2B-Instruct", role="target"))) is None
