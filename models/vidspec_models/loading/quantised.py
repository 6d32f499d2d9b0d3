"""Reads quantised checkpoints (AWQ, GPTQ, FP8, compressed-tensors) as the numbers that their weights stand for.

transformers needs another package for each of these formats, most of them a GPU, and computes with that package's
kernels, whose bits may depend on how many rows a step has. Here a weight is converted while it is read, and the model
is computed like any other (ADR 37).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from vidspec_models.decoder.quantised import Quantised
from vidspec_models.errors import ModelLoadError

Tensors = Mapping[str, Tensor]  # the tensors of one linear layer by the last part of their names
MARKS = {"qweight", "weight_packed", "weight_scale", "weight_scale_inv"}  # a quantised layer has one of these
_WORD_BITS = 32  # of the integers that small numbers are packed into
_BITS = (2, 4, 8)  # of numbers that are packed
_PACKED_FORMATS = {"float-quantized", "int-quantized", "naive-quantized", "pack-quantized"}
_READABLE = "AWQ (gemm), GPTQ, FP8, and compressed-tensors of integers or FP8 can be read"


def find_quantisation(config: Any) -> Mapping[str, Any] | None:
    """A configuration's settings of quantised weights. Raises ModelLoadError for weights that cannot be read."""
    found = [getattr(part, "quantization_config", None) for part in (config, config.get_text_config())]
    settings: Mapping[str, Any] | None = next(filter(None, found), None)
    if settings is None:
        return None
    method = str(settings.get("quant_method", "unknown"))
    if method not in _METHODS or (flaw := _METHODS[method].flaw(settings)):
        named = f"{method}: {flaw}" if method in _METHODS else method
        raise ModelLoadError(
            f"its weights are quantised ({named}), which is not supported; {_READABLE}. "
            "Or choose the checkpoint in bfloat16 or float32 that they were made from"
        )
    return settings


def read_weights(files: Sequence[Path], settings: Mapping[str, Any]) -> dict[str, Tensor | Quantised]:
    """All tensors of a checkpoint's files by name, mapped from the files; weights that are quantised as such.

    Raises ModelLoadError for a quantised weight that is not complete.
    """
    convert = _METHODS[str(settings["quant_method"])].convert
    weights: dict[str, Tensor | Quantised] = {}
    with ExitStack() as stack:
        layers: dict[str, dict[str, Any]] = defaultdict(dict)  # a layer's tensors may be in different files
        for file in files:
            opened = stack.enter_context(safe_open(str(file), framework="pt"))
            for name in opened.keys():  # noqa: SIM118  not a mapping
                layer, _, leaf = name.rpartition(".")
                layers[layer][leaf] = opened
        for layer, leaves in layers.items():
            prefix = f"{layer}." if layer else ""
            tensors = {leaf: opened.get_tensor(f"{prefix}{leaf}") for leaf, opened in leaves.items()}
            is_plain = MARKS.isdisjoint(tensors)
            weights |= {f"{prefix}{leaf}": tensor for leaf, tensor in tensors.items() if is_plain or leaf == "bias"}
            try:
                weights |= {} if is_plain else {f"{prefix}weight": convert(tensors, settings)}
            except KeyError as error:
                raise ModelLoadError(f"tensor '{prefix}{error.args[0]}' is missing from its files") from error
    return weights


def _from_awq(tensors: Tensors, _: Mapping[str, Any]) -> Quantised:
    """AutoAWQ's "gemm" layout (`WQLinear_GEMM`): transposed; of the eight numbers of a word, even ones come first."""

    def in_order(words: Tensor) -> Tensor:
        numbers: Tensor = _unpacked(words, 4).unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3).T
        return numbers

    words, blocks = tensors["qweight"], _Blocks(tensors["scales"].T, in_order(tensors["qzeros"]))
    shape = (words.shape[1] * 8, words.shape[0])
    return _quantised(shape, 4, lambda rows: in_order(words[:, rows.start // 8 : rows.stop // 8]), blocks)


def _from_gptq(tensors: Tensors, settings: Mapping[str, Any]) -> Quantised:
    """AutoGPTQ's layout: numbers packed along a row, zeros along the columns, less by one except in its version 2."""
    words, groups = tensors["qweight"], tensors["g_idx"]
    bits = len(words) * _WORD_BITS // len(groups)  # GPTQModel may give each layer its own
    stored_less = int(settings.get("checkpoint_format") != "gptq_v2")
    zeros = _unpacked(tensors["qzeros"], bits).T.to(torch.int16) + stored_less
    blocks = _Blocks(tensors["scales"].T, zeros, groups, (None, settings.get("group_size")))
    return _quantised((words.shape[1], len(groups)), bits, lambda rows: _unpacked(words[:, rows].T, bits), blocks)


def _from_fp8(tensors: Tensors, settings: Mapping[str, Any]) -> Quantised:
    """Numbers of eight bits with a scale for each block, or for all (DeepSeek-V3, arXiv 2412.19437, section 3.3)."""
    weight, scales = tensors["weight"], tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"]
    blocks = _Blocks(scales, size=settings.get("weight_block_size"))
    return _quantised(weight.shape, 8, weight.__getitem__, blocks)


def _from_compressed(tensors: Tensors, settings: Mapping[str, Any]) -> Quantised:
    """The layouts of the library compressed-tensors: packed integers have half of their range added."""
    scales, zeros, groups = tensors["weight_scale"], tensors.get("weight_zero_point"), tensors.get("weight_g_idx")
    weights = [group.get("weights") or {} for group in _config_groups(settings)]
    sizes = (args.get("block_structure") or (None, args.get("group_size")) for args in weights)
    size = next(filter(any, sizes), None)
    if groups is not None and -1 in groups:  # the library's mark for columns that are in order
        groups = None
    if "weight_packed" not in tensors:
        weight = tensors["weight"]
        return _quantised(weight.shape, 8, weight.__getitem__, _Blocks(scales, zeros, groups, size))
    words, shape = tensors["weight_packed"], tensors["weight_shape"].tolist()
    bits = words.shape[1] * _WORD_BITS // shape[1]
    if zeros is not None and zeros.dtype is torch.int32:
        zeros = _unpacked(zeros.T, bits).T[: shape[0]]
    else:  # none, or bytes: of one zero for all, or as older versions of the library stored every zero
        zeros = (torch.zeros_like(scales) if zeros is None else zeros).to(torch.int16) + (1 << (bits - 1))
    blocks = _Blocks(scales, zeros, groups, size)
    return _quantised(shape, bits, lambda rows: _unpacked(words[rows], bits)[:, : shape[1]], blocks)


class _Blocks(NamedTuple):
    """Scales and zeros of a weight's blocks: one for all, one for each row, or [blocks of rows, blocks of columns].

    Blocks are equal parts of the weight unless they have a size.
    """

    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None  # [K], to which block of columns each belongs; in order if it is None
    size: Sequence[int | None] | None = None  # rows and columns of a block, of which the last may have fewer


def _quantised(shape: Sequence[int], bits: int, numbers: Callable[[slice], Tensor], blocks: _Blocks) -> Quantised:
    num_rows, num_columns = shape
    counts = blocks.scales.shape if blocks.scales.ndim == 2 else (blocks.scales.numel(), 1)
    sizes = blocks.size or (None, None)
    high, width = (_length(*each) for each in zip(shape, counts, sizes, strict=True))
    groups = blocks.groups
    if groups is not None and not ((groups >= 0) & (groups < counts[1])).all():
        raise ModelLoadError(f"a weight has scales for {counts[1]} groups of columns, but columns in other groups")
    if groups is not None and torch.equal(groups, torch.arange(num_columns, dtype=groups.dtype) // width):
        groups = None

    def by_row(values: Tensor) -> Tensor:
        grid = values.reshape(counts)
        return grid if counts[0] == num_rows else grid.repeat_interleave(high, 0)[:num_rows]

    zeros = None if blocks.zeros is None else by_row(blocks.zeros)
    return Quantised((num_rows, num_columns), numbers, by_row(blocks.scales), zeros, width, groups, bits)


def _length(size: int, num_blocks: int, length: int | None) -> int:
    """How many rows or columns a block has."""
    if length is not None and -(-size // length) == num_blocks:
        return length
    if size % num_blocks:
        raise ModelLoadError(f"a weight has {size} rows or columns, but scales for {num_blocks} blocks of them")
    return size // num_blocks


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Numbers uint8 [R, C * 32 / bits] of words int32 [R, C], each of which has its first number in its lowest bits."""
    if bits not in _BITS:
        raise ModelLoadError(f"its weights are packed with {bits} bits a number; only 2, 4 and 8 can be read")
    pieces = words.contiguous().view(torch.uint8)
    return torch.stack([pieces >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).flatten(-2)


class _Method(NamedTuple):
    convert: Callable[[Tensors, Mapping[str, Any]], Quantised]
    flaw: Callable[[Mapping[str, Any]], str]  # why weights with these settings cannot be read; "" if they can


def _awq_flaw(settings: Mapping[str, Any]) -> str:
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit", 4))
    return "" if version == "gemm" and bits == 4 else f"version {version}, {bits} bits"


def _gptq_flaw(settings: Mapping[str, Any]) -> str:
    version, bits = settings.get("checkpoint_format", "gptq"), settings.get("bits")
    return "" if version in ("gptq", "gptq_v2") and bits in _BITS else f"{version}, {bits} bits"


def _config_groups(settings: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """How each kind of layer is quantised; none are where only the cache is."""
    return (settings.get("config_groups") or {}).values()


def _compressed_flaw(settings: Mapping[str, Any]) -> str:
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    transforms = (settings.get("transform_config") or {}).get("config_groups")  # rotations, some of them of activations
    others = {str(sparsity)} - {"dense"} | ({"transform_config"} if transforms else set())
    groups = {_group_flaw(group, settings.get("format")) for group in _config_groups(settings)}
    return ", ".join(sorted(groups - {""} | others))


def _group_flaw(group: Mapping[str, Any], usual_format: str | None) -> str:
    """Old versions of the library packed four numbers of seven bits into a word, so that they look like eight bits."""
    form, bits = group.get("format") or usual_format, (group.get("weights") or {}).get("num_bits")
    if form == "pack-quantized" and bits not in (None, *_BITS):
        return f"{bits} bits"
    return "" if form in _PACKED_FORMATS else str(form)


_METHODS: Mapping[str, _Method] = {
    "awq": _Method(_from_awq, _awq_flaw),
    "gptq": _Method(_from_gptq, _gptq_flaw),
    "fp8": _Method(_from_fp8, lambda _: ""),
    "compressed-tensors": _Method(_from_compressed, _compressed_flaw),
}
