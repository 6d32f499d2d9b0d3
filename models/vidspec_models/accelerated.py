"""Whether a decoder's steps run as captured kernels on CUDA; where they cannot, why, and the plain walk goes on."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from vidspec_models.decoder import Decoder

if TYPE_CHECKING:
    from vidspec_models.cuda_step import CudaStep

logger = logging.getLogger(__name__)


def make_cuda_step(decoder: Decoder) -> CudaStep | None:
    """Compile, capture, and measure row invariance as it is on this very path; None where that is not possible."""
    if decoder.geometry.split:
        logger.warning("decoding steps run uncaptured: a graph is of one device, the layers lie on several")
        return None
    try:
        from vidspec_models.cuda_kernels import supports
        from vidspec_models.cuda_step import CudaStep

        if not supports(decoder.num_heads, decoder.num_kv_heads, decoder.head_dim):
            logger.warning("decoding steps run uncaptured: heads of width %d do not fit the kernels", decoder.head_dim)
            return None
        step = CudaStep(decoder, decoder.row_rule.row_buckets)
        decoder.row_rule = replace(decoder.row_rule, holds=step.rows_are_invariant())
    except Exception as error:  # a missing Triton, C compiler or driver feature: slower, never wrong
        logger.warning("decoding steps run uncaptured, several times slower: %s: %s", type(error).__name__, error)
        return None
    return step
