"""Which kernels a model's decoding steps run on: compiled ones where model and device have them, else torch's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vidspec_models.backends.cpu.packing import suits
from vidspec_models.decoder.build import build_decoder
from vidspec_models.decoder.decoder import Decoder, Segment
from vidspec_models.decoder.measure_invariance import PREFILL_ONLY
from vidspec_models.decoder.placement import LayerSpan

if TYPE_CHECKING:
    from vidspec_models.backends.cuda.step import CudaStep

StepLogits = Callable[[Sequence[int], Sequence[int], list[Segment]], Tensor]  # as `Decoder.step`
logger = logging.getLogger(__name__)


@torch.inference_mode()
def make_decoder(
    language_model: Any, lm_head: Any, config: Any, spans: Sequence[LayerSpan]
) -> tuple[Decoder, StepLogits | None]:
    """A loaded model's decoder, and what computes its steps in its place, if anything does."""
    context_length = config.get_text_config().max_position_embeddings
    kind = spans[0].device.type
    if kind == "cpu" and len(spans) == 1 and suits(language_model):
        # These compile with numba, which a GPU machine can do without.
        from vidspec_models.backends.cpu.prompt_attention import PromptAttention
        from vidspec_models.backends.cpu.step import CpuStep

        attend_chunk = PromptAttention() if lm_head.weight.dtype is torch.bfloat16 else None
        rule = replace(PREFILL_ONLY, attend_chunk=attend_chunk)
        decoder = build_decoder(language_model, lm_head, context_length, batch_invariance=rule)
        return decoder, CpuStep(language_model, lm_head, decoder)
    decoder = build_decoder(language_model, lm_head, context_length, releases_layers=True, spans=spans)
    return decoder, make_cuda_step(decoder) if kind == "cuda" else None


def make_cuda_step(decoder: Decoder) -> CudaStep | None:
    """Compile, capture, and measure batch invariance as it is on this very path; None where that is not possible."""
    if decoder.geometry.split:
        logger.warning("decoding steps run uncaptured: a graph is of one device, the layers lie on several")
        return None
    try:
        from vidspec_models.backends.cuda.kernels import supports
        from vidspec_models.backends.cuda.step import CudaStep

        if not supports(decoder.num_heads, decoder.num_kv_heads, decoder.head_dim):
            logger.warning("decoding steps run uncaptured: heads of width %d do not fit the kernels", decoder.head_dim)
            return None
        step = CudaStep(decoder, decoder.batch_invariance.row_buckets)
        decoder.batch_invariance = replace(decoder.batch_invariance, holds=step.measure_invariance())
    except Exception as error:  # a missing Triton, C compiler or driver feature: slower, never wrong
        logger.warning("decoding steps run uncaptured, several times slower: %s: %s", type(error).__name__, error)
        return None
    return step
