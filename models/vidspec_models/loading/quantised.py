"""Reads quantised checkpoints (AWQ, GPTQ, FP8, compressed-tensors) as the numbers that their weights stand for.

transformers needs another package for each of these formats, most of them a GPU, and computes with that package's
kernels, whose bits may depend on how many rows a step has. Here a weight is converted while it is read, and the model
is computed like any other (ADR 37).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils.logging import tqdm

from vidspec_models.errors import ModelLoadError

Tensors = Mapping[str, Tensor]  # the tensors of one linear layer by the last part of their names
_MARKS = {"qweight", "weight_packed", "weight_scale", "weight_scale_inv"}  # a quantised layer has one of these
_WORD_BITS = 32  # of the integers that small numbers are packed into
_ROWS_AT_ONCE = 128
_PACKED_FORMATS = {"dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized"}
_READABLE = "AWQ (gemm), GPTQ, FP8, and compressed-tensors of integers or FP8 can be read"


class Quantised(NamedTuple):
    """A weight [N, K] as numbers, and the scales and zeros of its blocks: a weight is (number - zero) * scale.

    Blocks have `block` rows and columns, and the last ones fewer if need be; or they are equal parts of the weight.
    `groups` says to which block each column belongs if that is not the order of the columns.
    """

    shape: Sequence[int]  # N, K
    numbers: Callable[[slice], Tensor]  # of these rows, [rows, K]
    scales: Tensor  # [blocks of rows, blocks of columns]
    zeros: Tensor | None = None  # likewise
    groups: Tensor | None = None  # [K]
    block: Sequence[int] | None = None

    def weights(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K], some rows at a time: they stay in the processor's cache, and take little memory."""
        found = torch.empty(*self.shape, dtype=dtype)
        scales, zeros = self._for_rows(self.scales), None if self.zeros is None else self._for_rows(self.zeros)
        for first in range(0, self.shape[0], _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            numbers = self.numbers(rows).contiguous().float()
            if zeros is not None:
                numbers = numbers.sub_(self._for_columns(zeros[rows]))
            found[rows] = numbers.mul_(self._for_columns(scales[rows]))
        return found

    def _for_rows(self, values: Tensor) -> Tensor:
        """Each block's value for all of its rows: [N, blocks of columns]."""
        return values.float().repeat_interleave(self._length(0, len(values)), 0)[: self.shape[0]]

    def _for_columns(self, values: Tensor) -> Tensor:
        """Each block's value for all of its columns: [rows, K] of [rows, blocks of columns]."""
        if self.groups is not None:
            return values.index_select(1, self.groups)
        return values.repeat_interleave(self._length(1, values.shape[1]), 1)[:, : self.shape[1]]

    def _length(self, axis: int, num_blocks: int) -> int:
        """How many rows or columns a block has."""
        size = self.shape[axis]
        if self.block is not None and -(-size // self.block[axis]) == num_blocks:
            return self.block[axis]
        if size % num_blocks:
            raise ModelLoadError(f"a weight has {size} {('rows', 'columns')[axis]}, but scales for {num_blocks} blocks")
        return size // num_blocks


def find_quantisation(config: Any) -> Mapping[str, Any] | None:
    """A configuration's settings of quantised weights. Raises ModelLoadError for weights that cannot be read."""
    found = [getattr(part, "quantization_config", None) for part in (config, config.get_text_config())]
    settings = next((each if isinstance(each, Mapping) else each.to_dict() for each in found if each), None)
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


def read_weights(files: Sequence[Path], settings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a checkpoint's files by name, weights that `find_quantisation` found quantised in `dtype`.

    The others stay mapped from the files. Raises ModelLoadError for a quantised weight that is not complete.
    """
    convert = _METHODS[str(settings["quant_method"])].convert
    weights: dict[str, Tensor] = {}
    with ExitStack() as stack:
        layers: dict[str, dict[str, Any]] = defaultdict(dict)  # a layer's tensors may be in different files
        for file in files:
            opened = stack.enter_context(safe_open(str(file), framework="pt"))
            for name in opened.keys():  # noqa: SIM118  not a mapping
                layer, _, leaf = name.rpartition(".")
                layers[layer][leaf] = opened
        for layer, leaves in tqdm(layers.items(), desc="Converting weights"):
            tensors = {leaf: opened.get_tensor(f"{layer}.{leaf}".lstrip(".")) for leaf, opened in leaves.items()}
            if _MARKS.isdisjoint(tensors):
                weights |= {f"{layer}.{leaf}".lstrip("."): tensor for leaf, tensor in tensors.items()}
                continue
            try:
                weights[f"{layer}.weight"] = convert(tensors, settings).weights(dtype)
            except KeyError as error:
                raise ModelLoadError(f"tensor '{layer}.{error.args[0]}' is missing from its files") from error
            if "bias" in tensors:
                weights[f"{layer}.bias"] = tensors["bias"]
    return weights


def _from_awq(tensors: Tensors, _: Mapping[str, Any]) -> Quantised:
    """AutoAWQ's "gemm" layout (`WQLinear_GEMM`): transposed; of the eight numbers of a word, even ones come first."""

    def in_order(words: Tensor) -> Tensor:
        numbers: Tensor = _unpacked(words, 4).unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3).T
        return numbers

    words = tensors["qweight"]  # [K, N / 8]
    shape = (words.shape[1] * 8, words.shape[0])
    scales, zeros = tensors["scales"].T, in_order(tensors["qzeros"])
    return Quantised(shape, lambda rows: in_order(words[:, rows.start // 8 : rows.stop // 8]), scales, zeros)


def _from_gptq(tensors: Tensors, settings: Mapping[str, Any]) -> Quantised:
    """AutoGPTQ's layout: numbers packed along a row, zeros along the columns, less by one except in its version 2."""
    bits, stored_less = int(settings["bits"]), int(settings.get("checkpoint_format") != "gptq_v2")
    words, groups, scales = tensors["qweight"], tensors["g_idx"], tensors["scales"].T
    zeros = _unpacked(tensors["qzeros"], bits).T.to(torch.int16) + stored_less
    shape = (words.shape[1], len(groups))
    return Quantised(shape, lambda rows: _unpacked(words[:, rows].T, bits), scales, zeros, groups)


def _from_fp8(tensors: Tensors, settings: Mapping[str, Any]) -> Quantised:
    """Numbers of eight bits with a scale for each block, or for all (DeepSeek-V3, arXiv 2412.19437, section 3.3)."""
    weight, scales = tensors["weight"], tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"]
    return Quantised(weight.shape, weight.__getitem__, _as_grid(scales), block=settings.get("weight_block_size"))


def _from_compressed(tensors: Tensors, settings: Mapping[str, Any]) -> Quantised:
    """The layouts of the library compressed-tensors: packed integers have half of their range added."""
    zeros, groups = tensors.get("weight_zero_point"), tensors.get("weight_g_idx")
    scales = _as_grid(tensors["weight_scale"])
    if "weight_packed" not in tensors:
        weight, zeros = tensors["weight"], None if zeros is None else _as_grid(zeros)
        block = next(filter(None, (args.get("block_structure") for args in _weight_args(settings))), None)
        return Quantised(weight.shape, weight.__getitem__, scales, zeros, groups, block)
    words, shape = tensors["weight_packed"], tensors["weight_shape"].tolist()
    bits = words.shape[1] * _WORD_BITS // shape[1]
    more = 1 << (bits - 1)
    added = torch.full(scales.shape, more) if zeros is None else _unpacked(zeros.T, bits).T[: shape[0]]
    return Quantised(shape, lambda rows: _unpacked(words[rows], bits)[:, : shape[1]], scales, added, groups)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Numbers uint8 [R, C * 32 / bits] of words int32 [R, C], each of which has its first number in its lowest bits."""
    if bits not in (2, 4, 8):
        raise ModelLoadError(f"its weights are packed with {bits} bits a number; only 2, 4 and 8 can be read")
    pieces = words.contiguous().view(torch.uint8)
    return torch.stack([pieces >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).flatten(-2)


def _as_grid(values: Tensor) -> Tensor:
    """One value for all, or one for each row, as [blocks of rows, blocks of columns]."""
    return values if values.ndim == 2 else values.reshape(-1, 1)


def _weight_args(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What compressed-tensors says about the weights of each group of layers."""
    return [group.get("weights") or {} for group in settings.get("config_groups", {}).values()]


class _Method(NamedTuple):
    convert: Callable[[Tensors, Mapping[str, Any]], Quantised]
    flaw: Callable[[Mapping[str, Any]], str]  # why weights with these settings cannot be read; "" if they can


def _awq_flaw(settings: Mapping[str, Any]) -> str:
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit", 4))
    return "" if version == "gemm" and bits == 4 else f"version {version}, {bits} bits"


def _gptq_flaw(settings: Mapping[str, Any]) -> str:
    version, bits = settings.get("checkpoint_format", "gptq"), settings.get("bits")
    return "" if version in ("gptq", "gptq_v2") and bits in (2, 4, 8) else f"{version}, {bits} bits"


def _compressed_flaw(settings: Mapping[str, Any]) -> str:
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    groups = [group.get("format") or settings.get("format") for group in settings.get("config_groups", {}).values()]
    return ", ".join(sorted({str(each) for each in (*groups, sparsity)} - _PACKED_FORMATS))


_METHODS: Mapping[str, _Method] = {
    "awq": _Method(_from_awq, _awq_flaw),
    "gptq": _Method(_from_gptq, _gptq_flaw),
    "fp8": _Method(_from_fp8, lambda _: ""),
    "compressed-tensors": _Method(_from_compressed, _compressed_flaw),
}
