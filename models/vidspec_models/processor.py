"""What this machine's processor can do, as far as it decides how a model is held."""

from __future__ import annotations

import torch


def multiplies_bfloat16() -> bool:
    """Whether it has AVX512_BF16: torch's products need it to be fast in bfloat16, and ours to exist."""
    return bool(torch.cpu._is_avx512_bf16_supported())
