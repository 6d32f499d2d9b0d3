"""`compiled`: kernels as machine code without the interpreter's lock, kept from one start to the next."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import njit


def compiled(function: Any) -> Any:
    """Compiled without the interpreter's lock, and kept for the next start where there is a place to keep it."""
    try:
        kernel = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # a read-only installation and no writable cache folder
        return njit(nogil=True)(function)
    forget_stale(Path(kernel.stats.cache_path))
    return kernel


@lru_cache
def forget_stale(folder: Path, sources: Path = Path(__file__).parent) -> None:
    """Remove what was compiled before any of the sources was last changed.

    numba looks at the file of the kernel itself only, not at those of the tiles that it is made of. Another process
    may do the same at the same time: what is missing is compiled again.
    """
    changed = max(source.stat().st_mtime for source in sources.glob("*.py"))
    for kept in folder.glob("*.nb[ic]"):
        with contextlib.suppress(OSError):
            if kept.stat().st_mtime < changed:
                kept.unlink()
