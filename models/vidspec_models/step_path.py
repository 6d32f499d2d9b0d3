"""StepPath: how a model's decoding steps are computed, and where that costs a factor, why and what to do about it.

Without torch: the API process tells it to operators.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

_COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPath:
    """`fallback` is empty where nothing better is missing; it names no file, since anybody may read it."""

    how: str  # "captured graphs", "compiled kernels", the same "in int8", or "torch operators"
    fallback: str = ""  # what could not be had; steps take several times as long
    remedy: str = ""


CAPTURED = StepPath(how="captured graphs")
COMPILED = StepPath(how="compiled kernels")
COMPILED_INTEGERS = StepPath(how="compiled kernels in int8")
TORCH_OPERATORS = StepPath(how="torch operators")


def fallen_back(why: str, remedy: str) -> StepPath:
    """Operator by operator, for want of something better."""
    return replace(TORCH_OPERATORS, fallback=why, remedy=remedy)


def triton_remedy(error: Exception) -> str:
    """What to do about kernels that Triton could not make: it needs a C compiler, and runs files out of its cache."""
    if isinstance(error, ModuleNotFoundError):
        return "install Triton, which comes with torch's CUDA builds for Linux (pip install triton)"
    environment = os.environ  # noqa: TID251  Triton's own settings, not ours
    if "CC" not in environment and not any(map(shutil.which, _COMPILERS)):
        return "install a C compiler (Debian: apt-get install gcc libc6-dev), or name one with CC"
    home = environment.get("TRITON_HOME") or Path.home()
    folder = Path(environment.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    if flaw := folder_flaw(folder):
        return f"set TRITON_CACHE_DIR to a folder that can be written and executed from; {folder} {flaw}"
    return "read the error in the worker's log; compare driver and CUDA version (python -m torch.utils.collect_env)"


def numba_remedy(error: Exception) -> str:
    """What to do about kernels that numba could not make: it keeps them in a folder."""
    if isinstance(error, ModuleNotFoundError):
        return "install numba (pip install numba)"
    return "set NUMBA_CACHE_DIR to a folder that can be written; the worker's log has the error"


def folder_flaw(folder: Path) -> str:
    """Why compiled code cannot be kept in a folder, which may be still to be made; empty if it can."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        return "is on a file system mounted noexec"
    return "" if os.access(there, os.W_OK | os.X_OK) else "cannot be written"
