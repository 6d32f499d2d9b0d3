"""Placement of a model: devices by name, their precision, and which device holds which layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vidspec_models.decoder.int8 import INT4, INT8
from vidspec_models.decoder.kv_cache import LayerSpan
from vidspec_models.errors import ModelLoadError


def resolve_devices(names: str, role: str) -> tuple[torch.device, ...]:
    """Parse one device, or several of one type, separated by commas, for consecutive layers.

    "auto": the target gets the last CUDA device, the draft the first; the CPU without CUDA. Raises ModelLoadError.
    """
    if names == "auto":
        count = torch.cuda.device_count()
        return (torch.device("cuda", count - 1 if role == "target" else 0) if count else torch.device("cpu"),)
    devices = tuple(_existing(name) for name in names.split(","))
    if len({device.type for device in devices}) > 1:
        raise ModelLoadError(f"device {names!r}: layers can be on CUDA devices or on the CPU, not on both")
    return devices


def resolve_device(name: str, role: str) -> torch.device:
    """Like `resolve_devices`, for transformers' own `generate` and for training, which run on a single device."""
    first, *others = resolve_devices(name, role)
    if others:
        raise ModelLoadError(f"transformers' own code runs on one device here, not on {name!r}")
    return first


def _existing(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {name!r} is not one of cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(f"device {name!r} does not exist; CUDA devices found: {torch.cuda.device_count()}")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device  # one name per device


@dataclass(frozen=True, slots=True)
class Precision:
    """The type that a model computes in, and whether weights are rounded to int8 first, those of all products on a CPU,
    those of the language model on a GPU; with int4, its layers' weights to four bits before that.
    """

    dtype: torch.dtype
    is_int8: bool = False
    is_int4: bool = False

    @property
    def name(self) -> str:
        if self.is_int4:
            return INT4
        return INT8 if self.is_int8 else str(self.dtype).removeprefix("torch.")


def resolve_precision(name: str, device: torch.device, *, rounded_dtype: str | None = None) -> Precision:
    """The precision for a dtype's name. Raises ModelLoadError.

    "auto" is `rounded_dtype`, with which a checkpoint is known to do as well, if the processor has AVX2 and no usable
    AMX: int8 was not compared with AMX. Otherwise it is bfloat16 if the device is faster with it
    (see `is_faster_in_bfloat16`), else float32.
    """
    is_on_cpu = device.type == "cpu"
    if name == "auto" and is_on_cpu and rounded_dtype and torch.cpu._is_avx2_supported() and not _has_fast_amx():
        name = rounded_dtype
    if name in (INT4, INT8):
        if name == INT4 and not is_on_cpu:
            raise ModelLoadError(f"int4 weights need a CPU, but the device is {str(device)!r}: choose int8")
        return Precision(torch.float32 if is_on_cpu else torch.bfloat16, is_int8=True, is_int4=name == INT4)
    if name in ("float32", "bfloat16", "float16"):
        return Precision(getattr(torch, name))
    if name != "auto":
        raise ModelLoadError(f"dtype {name!r} is not one of auto, float32, bfloat16, float16, int8, int4")
    return Precision(torch.bfloat16 if device.type == "cuda" or is_faster_in_bfloat16() else torch.float32)


def is_faster_in_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 faster than float32.

    Measured (docs/benchmark-log.md): on Zen 4, prompts and steps of nine rows take two thirds of the time. On Intel's
    Emerald Rapids with AMX hidden by a virtual machine, the bfloat16 instruction exists, but torch's products take 1.8
    times as long with it. Without the instruction, products are emulated and several times slower.
    """
    return _has_fast_amx() or attends_in_bfloat16()


def attends_in_bfloat16() -> bool:
    """Whether int8 kernels keep keys and values in bfloat16: half the bytes, and faster on Zen 5.

    Only on AMD: not measured on Intel, where products take longer with the instruction (see `is_faster_in_bfloat16`).
    """
    return has_avx512_bf16() and _is_from_amd()


def _has_fast_amx() -> bool:
    return has_avx512_bf16() and bool(torch.cpu._is_amx_tile_supported())


@cache
def _is_from_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False


def has_avx512_bf16() -> bool:
    """Whether the processor has AVX512_BF16, which our bfloat16 kernels need."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def layer_spans(
    model: Any, language_model: Any, lm_head: Any, devices: Sequence[torch.device]
) -> tuple[LayerSpan, ...]:
    """A span for each device, in the given order; a device named twice gets two.

    Tower, projector and embedding are on the first layers' device, where rows start; final norm and head on the last
    layers', where rows end. Rows move between devices only at a span's end. Raises ModelLoadError for more devices than
    layers.
    """
    layers = language_model.layers
    if len(devices) > len(layers):
        raise ModelLoadError(f"{len(devices)} devices for a model of {len(layers)} layers: name at most {len(layers)}")
    is_tied = lm_head.weight is language_model.embed_tokens.weight
    behind = _num_bytes(language_model.norm) + _num_bytes(lm_head)
    before = _num_bytes(model) - _num_bytes(layers) - (_num_bytes(language_model.norm) if is_tied else behind)
    counts = layers_per_device(len(layers), _num_bytes(layers[0]), before, behind, len(devices))
    edges = pairwise(accumulate(counts, initial=0))
    return tuple(LayerSpan(device, range(*edge)) for device, edge in zip(devices, edges, strict=True))


def layers_per_device(num_layers: int, layer_bytes: int, before: int, behind: int, num_devices: int) -> list[int]:
    """Number of layers per device, at least one, such that the largest number of bytes on a device is minimal.

    The first device also holds `before` bytes, the last one `behind` bytes. All layers have the same size, so it is
    optimal to give each one to the device with the fewest bytes so far.
    """
    counts, held = [1] * num_devices, [layer_bytes] * num_devices
    held[0] += before
    held[-1] += behind
    for _ in range(num_layers - num_devices):
        least = held.index(min(held))
        counts[least] += 1
        held[least] += layer_bytes
    return counts


def move_to_devices(model: Any, language_model: Any, spans: Sequence[LayerSpan], *, is_int8: bool = False) -> None:
    """Move the model to its device; with several devices, or with `is_int8`, all but layers and head to the first one.

    The decoder fetches layers and head later, one by one: no device ever holds more than its part and one layer more.
    """
    if len(spans) == 1 and not is_int8:
        model.to(spans[0].device)
        return
    layers, head = language_model.layers, model.lm_head
    language_model.layers, model.lm_head = nn.ModuleList(), nn.Identity()
    model.to(spans[0].device)
    language_model.layers, model.lm_head = layers, head


def _num_bytes(module: Any) -> int:
    """Size of a module's weights, counting shared ones once."""
    return sum(parameter.nbytes for parameter in module.parameters())
