"""Selects the kernels for a model's decoding steps: compiled ones if model and device support them, else torch's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vidspec_models.backends.cpu.packing import has_kernels_for, is_faster_for_many_rows
from vidspec_models.backends.cuda.batch import ROW_BUCKETS
from vidspec_models.core_share import CoreShare
from vidspec_models.decoder.build import LayersAre, build_decoder
from vidspec_models.decoder.decoder import Decoder
from vidspec_models.decoder.int8 import fake_quantise, language_linears, require_whole_blocks, vision_linears
from vidspec_models.decoder.kv_cache import LayerSpan
from vidspec_models.decoder.measure_invariance import PREFILL_ONLY
from vidspec_models.decoder.placement import attends_in_bfloat16
from vidspec_models.decoder.weights import context_length_of, linears_by_product
from vidspec_models.step_path import (
    CAPTURED,
    COMPILED,
    COMPILED_INT8,
    TORCH_OPERATORS,
    StepPath,
    torch_fallback,
    triton_remedy,
)

if TYPE_CHECKING:
    from vidspec_models.backends.cpu.step import CpuStep
    from vidspec_models.backends.cuda.step import CudaStep

logger = logging.getLogger(__name__)


@torch.inference_mode()
def make_decoder(
    language_model: Any, lm_head: Any, config: Any, spans: Sequence[LayerSpan], *, is_int8: bool
) -> tuple[Decoder, CpuStep | CudaStep | None]:
    """A loaded model's decoder, with its step path set, and the kernels that compute its steps, if any.

    Set `is_int8` for weights to round to int8. On a CPU: an embedding in float32, products in any type; without int8
    kernels, the rounded weights are used in float32. Raises ModelLoadError if the rows of a product are not whole
    blocks.
    """
    linears = language_linears(language_model, lm_head) if is_int8 else []
    require_whole_blocks(linears)
    context_length = context_length_of(config.get_text_config())
    kind, path = spans[0].device.type, TORCH_OPERATORS
    layers_are: LayersAre = "rounded to int8" if is_int8 and kind == "cuda" else "moved"
    if kind == "cpu" and len(spans) == 1:
        found = make_cpu_step(language_model, lm_head, context_length, is_int8=is_int8)
        if not isinstance(found, StepPath):
            return found
        path = found
    if layers_are == "moved":
        fake_quantise(linears)
    decoder = build_decoder(language_model, lm_head, context_length, layers_are=layers_are, spans=spans)
    step = make_cuda_step(decoder) if kind == "cuda" else path
    if isinstance(step, StepPath):
        decoder.step_path = step
        return decoder, None
    decoder.step_path = CAPTURED
    return decoder, step


def import_kernels() -> None:
    """Import the modules of `make_cpu_step` and start the compiler in advance; does nothing if numba is missing."""
    with suppress(ImportError, OSError, RuntimeError):
        from numba import njit

        import vidspec_models.backends.cpu.prompt
        import vidspec_models.backends.cpu.prompt_attention
        import vidspec_models.backends.cpu.tower  # noqa: F401

        njit("int64()")(lambda: 0)  # half a second, once


def make_cpu_step(
    language_model: Any, lm_head: Any, context_length: int, *, is_int8: bool
) -> tuple[Decoder, CpuStep] | StepPath:
    """Compile the kernels or load them from the cache; returns the fallback path with its reason if that fails."""
    embedding = language_model.embed_tokens.weight
    if not has_kernels_for(language_model):
        dtype = str(embedding.dtype).removeprefix("torch.")
        logger.warning("decoding steps run uncompiled: there are no kernels for a model of these sizes in %s", dtype)
        return torch_fallback(
            f"no kernels for a model of these sizes in {dtype}",
            "choose the dtype auto, or a checkpoint whose sizes are multiples of 32",
        )
    try:
        # These modules need numba, which may be missing on a GPU machine.
        from vidspec_models.backends.cpu.kernel_cache import is_kept
        from vidspec_models.backends.cpu.layers import rounded
        from vidspec_models.backends.cpu.prompt import CpuPrompt
        from vidspec_models.backends.cpu.prompt_attention import PromptAttention
        from vidspec_models.backends.cpu.step import CpuStep

        cores = CoreShare()
        computes_prompts = are_prompt_kernels_faster(language_model, is_int8=is_int8)
        # In float32, torch's own attention is as fast on two cores.
        is_attended = not computes_prompts and embedding.dtype is torch.bfloat16
        cache_dtype = torch.bfloat16 if is_int8 and attends_in_bfloat16() else None
        attend_chunk = PromptAttention(torch.bfloat16, cores) if is_attended else None
        rule = replace(PREFILL_ONLY, attend_chunk=attend_chunk, cache_dtype=cache_dtype)
        if is_int8:  # what kernels alone use is rounded as they take it over, from its own type
            is_tied = lm_head.weight is embedding
            fake_quantise([lm_head] * is_tied if computes_prompts else language_linears(language_model, lm_head))
        layers: LayersAre = "left out" if computes_prompts else "copied"
        decoder = build_decoder(language_model, lm_head, context_length, batch_invariance=rule, layers_are=layers)
        decoder.cores = cores  # shared with `attend_chunk`
        step = CpuStep(language_model, lm_head, decoder, is_int8=is_int8)
        if computes_prompts:
            decoder.prompts = CpuPrompt(step)
    except (ImportError, OSError, RuntimeError) as error:  # numba, or the library of its compiler, is missing
        logger.warning("decoding steps run uncompiled, several times slower: %s: %s", type(error).__name__, error)
        remedy = "install numba again (pip install --force-reinstall numba); the worker's log has the error"
        return torch_fallback("the kernels do not compile", remedy)
    if not is_kept(rounded):
        remedy = "set NUMBA_CACHE_DIR to a folder that this user can write to, with some 10 MB of room"
        logger.warning("each start compiles the kernels anew, since they cannot be kept: %s", remedy)
    logger.info("decoding steps run in compiled kernels, threads: %d", step.num_threads)
    decoder.step_path = COMPILED_INT8 if is_int8 else COMPILED
    return decoder, step


@torch.inference_mode()
def compile_cpu_tower(model: Any, cores: CoreShare, *, is_int8: bool) -> None:
    """Replace the vision tower's layers by kernels, if there are kernels for them and these compile.

    With `is_int8` its products are rounded, which may have weights of any type. Without kernels, the rounded weights
    are used in float32.
    """
    try:
        from vidspec_models.backends.cpu.tower import compile_tower

        compile_tower(model, cores, is_int8=is_int8)
    except (ImportError, OSError, RuntimeError):  # already logged by `make_cpu_step`
        fake_quantise(vision_linears(model) if is_int8 else ())


def are_prompt_kernels_faster(language_model: Any, *, is_int8: bool) -> bool:
    """Whether prompts were measured to be faster with the step's kernels than with torch's products."""
    if attends_in_bfloat16():
        return True
    if language_model.embed_tokens.weight.dtype is torch.bfloat16 or not torch.cpu._is_avx2_supported():
        return False
    linears = [linear for part in linears_by_product(language_model.layers[0]) for linear in part]
    num_weights = sum(linear.in_features * linear.out_features for linear in linears)
    return is_int8 or is_faster_for_many_rows(num_weights)


def make_cuda_step(decoder: Decoder) -> CudaStep | StepPath:
    """Compile, capture, and measure batch invariance on this path; or the fallback path with its reason.

    Raises OutOfMemoryError.
    """
    if decoder.geometry.split:
        logger.warning("decoding steps run without CUDA graphs: a graph runs on one device, the layers are on several")
        return TORCH_OPERATORS  # as chosen: see docs/models.md
    try:
        from vidspec_models.backends.cuda.kernels import supports
        from vidspec_models.backends.cuda.step import CudaStep

        width = decoder.geometry.head_dim
        if not supports(decoder.num_heads, decoder.geometry.num_kv_heads, width):
            logger.warning("decoding steps run without CUDA graphs: there are no kernels for heads of width %d", width)
            return torch_fallback(
                f"no kernels for heads of width {width}", "choose a checkpoint that docs/models.md lists"
            )
        step = CudaStep(decoder)
        is_invariant = step.measure_invariance()
        if not is_invariant:  # perhaps only rows of different sizes differ: try a single size
            step = CudaStep(decoder, ROW_BUCKETS[-1:])
            is_invariant = step.measure_invariance()
        decoder.batch_invariance = replace(decoder.batch_invariance, holds=is_invariant)
    except torch.OutOfMemoryError:  # the model does not fit
        raise
    except Exception as error:  # a missing Triton, C compiler or driver feature: slower, never wrong
        logger.warning(
            "decoding steps run without CUDA graphs, several times slower: %s: %s", type(error).__name__, error
        )
        return torch_fallback("steps cannot be compiled and captured", triton_remedy(error))
    return step
