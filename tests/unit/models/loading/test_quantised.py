"""Quantised checkpoints load as the numbers that their weights stand for, in every layout that can be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tests.unit.models.families.tiny_checkpoints import FAMILIES, save
from vidspec_models.decoder.int8 import layer_linears
from vidspec_models.decoder.placement import Precision
from vidspec_models.decoder.quantised import Quantised, make_plain
from vidspec_models.errors import ModelLoadError
from vidspec_models.loading import checkpoint
from vidspec_models.loading.checkpoint import load_config, load_stock_model
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.quantised import find_quantisation, read_weights
from vidspec_models.loading.spec import ModelSpec

pytestmark = pytest.mark.unit
FLOAT32, INT8 = Precision(torch.float32), Precision(torch.float32, is_int8=True)
ROWS, COLUMNS, GROUP = 176, 64, 32  # more rows than are converted at once


class Stored(NamedTuple):
    """A random weight in a checkpoint's layout, and the numbers that it stands for."""

    tensors: dict[str, Tensor]
    weight: Tensor


class Layout(NamedTuple):
    settings: dict[str, Any]
    store: Callable[[int, int], Stored]  # of so many rows and columns


def packed(numbers: Tensor, bits: int, order: Iterable[int] | None = None) -> Tensor:
    """Rows of numbers as rows of words, the first number of a word in its lowest bits."""
    places = list(range(32 // bits) if order is None else order)
    words = []
    for row in numbers.tolist():
        row += [0] * (-len(row) % len(places))
        chunks = [row[first : first + len(places)] for first in range(0, len(row), len(places))]
        words.append([sum(chunk[place] << bits * at for at, place in enumerate(places)) for chunk in chunks])
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def scales_for(*shape: int) -> Tensor:
    return (torch.rand(shape) + 0.5).half().float()


def numbers_for(bits: int, *shape: int) -> Tensor:
    found = torch.randint(1 << bits, shape)
    found[0, 0] = (1 << bits) - 1
    return found


def awq(rows: int, columns: int) -> Stored:
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # `order_map` of AutoAWQ's WQLinear_GEMM
    groups = columns // GROUP
    numbers, zeros, scales = numbers_for(4, columns, rows), numbers_for(4, groups, rows), scales_for(groups, rows)
    group = torch.arange(columns) // GROUP
    tensors = {"qweight": packed(numbers, 4, order), "qzeros": packed(zeros, 4, order), "scales": scales.half()}
    return Stored(tensors, ((numbers - zeros[group]) * scales[group]).T)


def gptq(bits: int, *, version: int, size: int = GROUP, in_order: bool = False) -> Callable[[int, int], Stored]:
    def store(rows: int, columns: int) -> Stored:
        groups = -(-columns // size)
        numbers, zeros, scales = (
            numbers_for(bits, columns, rows),
            numbers_for(bits, groups, rows),
            scales_for(groups, rows),
        )
        group = torch.arange(columns) // size if in_order else torch.randint(groups, (columns,))  # as with desc_act
        tensors = {
            "qweight": packed(numbers.T, bits).T,
            "qzeros": packed(zeros, bits),
            "scales": scales.half(),
            "g_idx": group.int(),
        }
        return Stored(tensors, ((numbers - zeros[group] - int(version == 1)) * scales[group]).T)

    return store


def fp8(scale_name: str, block: tuple[int, int] | None) -> Callable[[int, int], Stored]:
    def store(rows: int, columns: int) -> Stored:
        numbers = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        high, wide = block or (rows, columns)
        scales = scales_for(-(-rows // high), -(-columns // wide))
        spread = scales[torch.arange(rows) // high][:, torch.arange(columns) // wide]
        stored = scales if block else scales.reshape(())
        return Stored({"weight": numbers, scale_name: stored, "input_scale": torch.ones(1)}, numbers.float() * spread)

    return store


def int8_channels(rows: int, columns: int) -> Stored:
    numbers, scales = torch.randint(-127, 128, (rows, columns), dtype=torch.int8), scales_for(rows, 1)
    return Stored({"weight": numbers, "weight_scale": scales.bfloat16()}, numbers * scales.bfloat16().float())


def packed_integers(
    bits: int, *, has_zeros: bool, order: bool = False, size: int = GROUP
) -> Callable[[int, int], Stored]:
    def store(rows: int, columns: int) -> Stored:
        groups, more = -(-columns // size), 1 << (bits - 1)
        numbers, scales = numbers_for(bits, rows, columns), scales_for(rows, groups)
        zeros = numbers_for(bits, rows, groups) if has_zeros else torch.full((rows, groups), more)
        group = torch.randint(groups, (columns,)) if order else torch.arange(columns) // size
        tensors = {
            "weight_packed": packed(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        tensors |= {"weight_zero_point": packed(zeros.T, bits).T} if has_zeros else {}
        tensors |= {"weight_g_idx": group.int()} if order else {}
        return Stored(tensors, (numbers - zeros[:, group]) * scales[:, group])

    return store


def marked_as_in_order(rows: int, columns: int) -> Stored:
    stored = packed_integers(4, has_zeros=False)(rows, columns)
    return stored._replace(tensors=stored.tensors | {"weight_g_idx": torch.full((columns,), -1, dtype=torch.int32)})


def one_scale_in_a_list(rows: int, columns: int) -> Stored:
    stored = fp8("weight_scale", None)(rows, columns)
    return stored._replace(tensors=stored.tensors | {"weight_scale": stored.tensors["weight_scale"].reshape(1)})


def in_no_whole_words(rows: int, columns: int) -> Stored:
    """The last word of a row, and the words with the zeros of the last rows, have fewer numbers."""
    return packed_integers(4, has_zeros=True, size=columns - 3)(rows - 3, columns - 3)


def zeros_in_bytes(rows: int, columns: int) -> Stored:
    """As older versions of compressed-tensors stored zeros, and newer ones store one for the whole weight."""
    stored = packed_integers(4, has_zeros=False)(rows, columns)
    scales, group = stored.tensors["weight_scale"], torch.arange(columns) // GROUP
    zeros = torch.randint(-8, 8, scales.shape, dtype=torch.int8)
    return Stored(stored.tensors | {"weight_zero_point": zeros}, stored.weight - (zeros * scales)[:, group])


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


LAYOUTS = {
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq of 4 bits": Layout({"quant_method": "gptq", "bits": 4}, gptq(4, version=1)),
    "gptq of 8 bits": Layout({"quant_method": "gptq", "bits": 8}, gptq(8, version=1)),
    "gptq of 8 bits in one of 4": Layout({"quant_method": "gptq", "bits": 4}, gptq(8, version=1)),
    "gptq, a smaller last group": Layout(
        {"quant_method": "gptq", "bits": 4, "group_size": 24}, gptq(4, version=1, size=24)
    ),
    "gptq, version 2": Layout({"quant_method": "gptq", "bits": 2, "checkpoint_format": "gptq_v2"}, gptq(2, version=2)),
    "fp8 in blocks": Layout({"quant_method": "fp8", "weight_block_size": [40, 24]}, fp8("weight_scale_inv", (40, 24))),
    "fp8, one scale": Layout({"quant_method": "fp8"}, fp8("weight_scale", None)),
    "compressed fp8 in blocks": Layout(
        compressed("float-quantized", block_structure=[40, 24]), fp8("weight_scale", (40, 24))
    ),
    "compressed fp8 by row": Layout(compressed("float-quantized"), fp8("weight_scale", (1, COLUMNS))),
    "compressed fp8, one scale": Layout(compressed("float-quantized"), one_scale_in_a_list),
    "compressed int8 by row": Layout(compressed("int-quantized"), int8_channels),
    "compressed 4 bits": Layout(compressed("pack-quantized"), packed_integers(4, has_zeros=False)),
    "compressed 4 bits with zeros": Layout(compressed("pack-quantized"), packed_integers(4, has_zeros=True)),
    "compressed 4 bits with zeros in bytes": Layout(compressed("pack-quantized"), zeros_in_bytes),
    "compressed 4 bits in an order": Layout(
        compressed("pack-quantized"), packed_integers(4, has_zeros=False, order=True)
    ),
    "compressed 4 bits, marked as in order": Layout(compressed("pack-quantized"), marked_as_in_order),
    "compressed 4 bits, a smaller last group": Layout(
        compressed("pack-quantized", group_size=48), packed_integers(4, has_zeros=True, size=48)
    ),
    "compressed 4 bits, in no whole words": Layout(compressed("pack-quantized"), in_no_whole_words),
    "compressed 8 bits": Layout(compressed("pack-quantized"), packed_integers(8, has_zeros=False)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layer_of_any_readable_layout_becomes_what_its_numbers_stand_for(name: str, tmp_path: Path) -> None:
    torch.manual_seed(len(name))
    settings, store = LAYOUTS[name]
    tensors, weight = store(ROWS, COLUMNS)
    others = {
        "model.layer.bias": torch.randn(ROWS),
        "model.norm.weight": torch.randn(COLUMNS),
        "logit_scale": torch.ones(1),
    }
    stored = {f"model.layer.{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()} | others
    for at, part in enumerate((sorted(stored)[::2], sorted(stored)[1::2])):  # a layer's tensors in two files
        save_file({key: stored[key] for key in part}, tmp_path / f"{at}.safetensors")
    found = read_weights(sorted(tmp_path.iterdir()), settings)
    assert set(found) == {"model.layer.weight", *others}
    layer = found.pop("model.layer.weight")
    assert isinstance(layer, Quantised)
    assert torch.equal(layer.weights(torch.float32), weight.float())
    assert all(isinstance(tensor, Tensor) and torch.equal(tensor, others[key]) for key, tensor in found.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_model_of_every_family_is_the_plain_model_with_its_numbers(family: str, tmp_path: Path) -> None:
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    save(family, plain)
    quantise(plain, quantised, "awq")
    wanted, found = (stock(folder) for folder in (plain, quantised))
    assert state(found).keys() == state(wanted).keys()
    assert all(torch.equal(state(found)[key], tensor) for key, tensor in state(wanted).items())
    assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
    assert getattr(found.config, "quantization_config", None) is None


def test_settings_in_the_language_models_configuration_are_read_as_those_outside_and_gone_afterwards(
    tmp_path: Path,
) -> None:
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    save("llava_onevision", plain)
    quantise(plain, quantised, "awq")
    config = json.loads((quantised / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (quantised / "config.json").write_text(json.dumps(config))
    found = stock(quantised)
    assert all(torch.equal(state(found)[key], tensor) for key, tensor in state(stock(plain)).items())
    assert find_quantisation(found.config) is None


def test_a_quantised_model_is_served_and_told_of_int8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save("llava_onevision", tmp_path / "plain")
    quantise(tmp_path / "plain", tmp_path / "quantised", "compressed fp8 in blocks")
    load_model(ModelSpec(path=str(tmp_path / "quantised"), role="target", device="cpu", dtype="float32"))
    assert "quantised weights are converted; --target-dtype int8 keeps them small" in caplog.messages


def test_in_int8_the_layers_keep_their_weights_as_they_are_stored(tmp_path: Path) -> None:
    save("llava_onevision", tmp_path / "plain")
    quantise(tmp_path / "plain", tmp_path / "quantised", "gptq of 4 bits")
    plain, found = (stock(tmp_path / name, INT8) for name in ("plain", "quantised"))
    linears = [layer_linears(model.model.language_model) for model in (plain, found)]
    for wanted, linear in zip(*linears, strict=True):
        assert linear.weight.untyped_storage().nbytes() < 16
        make_plain(linear, torch.float32)
        assert torch.equal(linear.weight, wanted.weight)
    assert all(torch.equal(state(found)[key], tensor) for key, tensor in state(plain).items())


def test_rows_that_are_not_whole_blocks_are_refused_in_four_bits_as_in_eight(tmp_path: Path) -> None:
    save("llava_onevision", tmp_path)
    with pytest.raises(ModelLoadError, match="multiples of 64, but one is 96; choose another dtype"):
        load_model(ModelSpec(path=str(tmp_path), role="target", device="cpu", dtype="int4"))


def test_weights_that_the_model_does_not_have_are_left_out_and_lost_ones_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("llava_onevision", tmp_path / "plain")
    quantise(tmp_path / "plain", tmp_path / "quantised", "awq")
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_address", lambda module: id(module))
        with pytest.raises(ModelLoadError, match="does not keep the tensors it is given"):
            stock(tmp_path / "quantised")
    file = tmp_path / "quantised" / "model.safetensors"
    more = {key.replace("layers.1", "layers.9"): value.clone() for key, value in load_file(file).items()}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    stock(tmp_path / "quantised")


def test_a_configuration_of_another_size_is_told_as_for_plain_weights(tmp_path: Path) -> None:
    save("llava_onevision", tmp_path / "plain")
    quantise(tmp_path / "plain", tmp_path / "quantised", "awq")
    for folder in (tmp_path / "plain", tmp_path / "quantised"):
        settings = json.loads((folder / "config.json").read_text())
        settings["text_config"]["intermediate_size"] = 128
        (folder / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ModelLoadError, match=r"has shape \[64, 96\], but config.json needs \[64, 128\]"):
            stock(folder)


@pytest.mark.parametrize("layout", ["awq", "fp8, one scale", "fp8 in blocks", "compressed int8 by row"])
def test_quantised_weights_that_the_configuration_does_not_tell_of_are_refused(layout: str, tmp_path: Path) -> None:
    """Without their scales, numbers of eight bits would load as if they were the weights."""
    save("llava_onevision", tmp_path / "plain")
    quantise(tmp_path / "plain", tmp_path / "quantised", layout)
    shutil.copy(tmp_path / "plain" / "config.json", tmp_path / "quantised")
    with pytest.raises(ModelLoadError, match="belongs to quantised weights, but its config"):
        stock(tmp_path / "quantised")


def test_only_the_files_that_the_index_names_are_read_and_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, quantised, fetched = tmp_path / "plain", tmp_path / "quantised", tmp_path / "fetched"
    save("llava_onevision", plain)
    quantise(plain, quantised, "awq")
    weights = load_file(quantised / "model.safetensors")
    files = {key: f"part-{number % 2}.safetensors" for number, key in enumerate(sorted(weights))}
    for name in set(files.values()):
        save_file({key: weights[key] for key in files if files[key] == name}, quantised / name)
    (quantised / "model.safetensors").unlink()
    (quantised / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    stale = {key: torch.full_like(tensor, 3) for key, tensor in weights.items()}
    save_file(stale, quantised / "zz-stale.safetensors")

    def snapshot_download(_: str, *, allow_patterns: list[str], **others: Any) -> str:
        fetched.mkdir(exist_ok=True)
        for name in allow_patterns:
            if (quantised / name).is_file():
                shutil.copy(quantised / name, fetched)
        return str(fetched)

    monkeypatch.setattr(checkpoint, "snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # nothing else may ask the hub
    wanted = state(stock(plain))
    for found in (stock(quantised), stock(quantised, path="some/model")):
        assert all(torch.equal(state(found)[key], tensor) for key, tensor in wanted.items())
    assert {file.name for file in fetched.iterdir()} == {"model.safetensors.index.json", *files.values()}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq: version gemv, 4 bits"),
        ({"quant_method": "gptq", "bits": 3}, "gptq: gptq, 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq: marlin, 4 bits"),
        (compressed("dense"), "compressed-tensors: dense"),
        (compressed("pack-quantized", num_bits=7), "compressed-tensors: 7 bits"),
        (compressed("pack-quantized") | {"transform_config": {"config_groups": {"u": {}}}}, ": transform_config"),
        (compressed("nvfp4-pack-quantized"), "compressed-tensors: nvfp4-pack-quantized"),
        (compressed("pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_settings(settings: dict[str, Any], named: str) -> None:
    config = PreTrainedConfig(quantization_config=settings)
    with pytest.raises(ModelLoadError, match=named):
        find_quantisation(config)


def test_columns_in_order_need_no_list_of_their_groups_so_that_int8_takes_their_numbers(tmp_path: Path) -> None:
    tensors = gptq(4, version=1, in_order=True)(ROWS, COLUMNS).tensors
    save_file({f"layer.{key}": value.contiguous() for key, value in tensors.items()}, tmp_path / "model.safetensors")
    layer = read_weights([tmp_path / "model.safetensors"], {"quant_method": "gptq", "bits": 4})["layer.weight"]
    assert isinstance(layer, Quantised)
    assert layer.has_integers(GROUP)


def test_settings_of_a_quantised_cache_alone_leave_the_weights_as_they_are(tmp_path: Path) -> None:
    settings = compressed("dense") | {"config_groups": None}
    assert find_quantisation(PreTrainedConfig(quantization_config=settings)) == settings
    save_file({"layer.weight": torch.ones(ROWS, COLUMNS)}, tmp_path / "model.safetensors")
    found = read_weights([tmp_path / "model.safetensors"], settings)["layer.weight"]
    assert isinstance(found, Tensor)
    assert torch.equal(found, torch.ones(ROWS, COLUMNS))


@pytest.mark.parametrize("leaf", ["qzeros", "scales", "g_idx"])
def test_a_quantised_layer_that_is_not_complete_is_an_error_that_names_the_tensor(leaf: str, tmp_path: Path) -> None:
    settings, store = LAYOUTS["gptq of 4 bits"]
    tensors = {f"layer.{key}": value.contiguous() for key, value in store(ROWS, COLUMNS).tensors.items()}
    del tensors[f"layer.{leaf}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"tensor 'layer\.{leaf}' is missing from its files"):
        read_weights([tmp_path / "model.safetensors"], settings)


def test_scales_that_do_not_divide_a_weight_are_an_error(tmp_path: Path) -> None:
    tensors = {"layer.weight": torch.zeros(ROWS, COLUMNS, dtype=torch.int8), "layer.weight_scale": torch.ones(7, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"a weight has {ROWS} rows or columns, but scales for 7 blocks"):
        read_weights([tmp_path / "model.safetensors"], compressed("int-quantized"))


@pytest.mark.parametrize("group", [-1, COLUMNS // GROUP])
def test_columns_of_a_group_that_has_no_scales_are_an_error(group: int, tmp_path: Path) -> None:
    settings, store = LAYOUTS["gptq of 4 bits"]
    tensors = {f"layer.{key}": value.contiguous() for key, value in store(ROWS, COLUMNS).tensors.items()}
    tensors["layer.g_idx"][5] = group
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="a weight has scales for 2 groups of columns"):
        read_weights([tmp_path / "model.safetensors"], settings)


def quantise(plain: Path, folder: Path, name: str) -> None:
    """Copy a checkpoint with the language model's linear layers stored in a layout; `plain` gets the same numbers."""
    torch.manual_seed(1)
    shutil.copytree(plain, folder)
    settings, store = LAYOUTS[name]
    (folder / "config.json").write_text(
        json.dumps({**json.loads((plain / "config.json").read_text()), "quantization_config": settings})
    )
    weights = load_file(plain / "model.safetensors")
    stored = dict(weights)
    for key in [key for key in weights if "layers" in key and key.endswith("proj.weight") and "visi" not in key]:
        made = store(*weights[key].shape)
        weights[key] = made.weight.float().contiguous()
        del stored[key]
        stored |= {f"{key.removesuffix('weight')}{leaf}": tensor.contiguous() for leaf, tensor in made.tensors.items()}
    assert len(stored) > len(weights)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def stock(folder: Path, precision: Precision = FLOAT32, path: str = "") -> Any:
    """The model of a folder's configuration, with weights from another path if one is given."""
    return load_stock_model(path or str(folder), None, load_config(str(folder), None), precision)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers, also those that no file has."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
