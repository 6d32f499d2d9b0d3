"""Compiles kernels and keeps them for the next start, beside the sources or in numba's folder. Needs no torch."""

from __future__ import annotations

import contextlib
import fcntl
import pickle
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import config
from numba.core.compiler_lock import global_compiler_lock

_INT8 = Path(__file__).parents[2] / "decoder" / "int8.py"  # whose numbers are compiled into kernels


def compiled(function: Any) -> Any:
    """Compile to run without the interpreter lock; cached for the next start if there is a writable cache folder.

    Divisions by 0 give what NumPy's give: Python's errors would check one divisor after the other.
    """
    compile_kernel, digest = partial(njit, nogil=True, error_model="numpy"), sources_digest()
    name = function.__qualname__
    function.__qualname__ += f"-{digest}"  # numba names a kernel's cache files after it
    try:
        kernel = compile_kernel(cache=True)(function)
    except RuntimeError:  # a read-only installation and no writable cache folder
        return compile_kernel()(function)
    folder = Path(kernel.stats.cache_path)
    forget_useless(folder, digest)
    kernel.compile = partial(compile_once, kernel.compile, folder / name)
    kernel._cache.save_overload = partial(keep, kernel._cache.save_overload, folder / f"{name}.lock")
    return kernel


def inlined(function: Any) -> Any:
    """Compile as part of the kernel that calls it: for functions of which no two kernels need the same.

    LLVM optimises what is compiled by itself once more in each kernel above it.
    """
    return njit(inline="always", error_model="numpy")(function)


def compile_once(compile_kernel: Callable[[Any], Any], place: Path, signature: Any) -> Any:
    """Compile a kernel for a signature, unless another process does so now: then load what that keeps.

    Target and draft start at the same time and need the same kernels.
    """
    with global_compiler_lock:  # as numba does; taken first, or a thread with it and one with the file would wait
        try:
            with locked(place.with_name(f"{place.name}-{sha256(repr(signature).encode()).hexdigest()[:16]}.lock")):
                return compile_kernel(signature)
        except OSError:  # two may compile it, then
            return compile_kernel(signature)


def keep(save: Callable[[Any, Any], None], lock: Path, signature: Any, result: Any) -> None:
    """Save what was compiled, if that is possible. numba may give one file to two signatures that two processes save at
    once.
    """
    with contextlib.suppress(OSError), locked(lock):  # on a full disk, or with another user's lock: it is in memory
        save(signature, result)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process is inside with the same file."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@lru_cache
def sources_digest(folder: Path = Path(__file__).parent) -> str:
    """Differs whenever one of the sources that kernels are compiled from differs.

    numba only compares a kernel's own file, not those of the kernels and tiles that it uses. Times cannot tell, either:
    in an image, the files of another version may be older than kernels that were kept outside of it.
    """
    sources = (*sorted(folder.glob("*.py")), _INT8)
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


@lru_cache
def forget_useless(folder: Path, digest: str) -> None:
    """Remove kernels of other sources, and files that were cut short by a loss of power: numba fails to read them.

    Another process may do the same at the same time: missing kernels are compiled again.
    """
    for kept in folder.glob("*.nb[ic]"):
        with contextlib.suppress(OSError):
            if digest not in kept.name or not kept.read_bytes().endswith(pickle.STOP):
                kept.unlink()


def is_kept(kernel: Any) -> bool:
    """Whether the next start finds a kernel that was compiled, or others beside it: in NUMBA_CACHE_DIR, if that is set.

    If numba cannot write there, it takes a folder below HOME, which in a container ends with it.
    """
    folder, wanted = Path(kernel.stats.cache_path or ""), Path(config.CACHE_DIR)
    return wanted in (Path(), *folder.parents) and any(folder.glob(f"*{sources_digest()}*.nbc"))
