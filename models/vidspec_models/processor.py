"""What this machine's processor can do, and how many of its cores torch may use for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def multiplies_bfloat16() -> bool:
    """Whether it has AVX512_BF16: torch's products need it to be fast in bfloat16, and ours to exist."""
    return bool(torch.cpu._is_avx512_bf16_supported())


@contextmanager
def using_threads(num_threads: int) -> Iterator[None]:
    """Torch uses so many inside. A core that somebody else keeps busy is worth leaving out: every product waits for
    the slowest of its threads, and small ones for nothing else.
    """
    usual = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
