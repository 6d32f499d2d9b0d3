"""StepPath: how a model's decoding steps are computed; if the path is a slow fallback, why, and what to do about it.

Needs no torch: the API process shows it to operators.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

_COMPILERS = ("cc", "gcc", "clang")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPath:
    """`fallback` is empty if the path is the intended one; it names no files, since it is publicly readable."""

    how: str  # "captured graphs", "compiled kernels", "compiled kernels in int8" or "torch operators"
    fallback: str = ""  # why the faster path is missing; steps take several times as long
    remedy: str = ""


CAPTURED = StepPath(how="captured graphs")
COMPILED = StepPath(how="compiled kernels")
COMPILED_INT8 = StepPath(how="compiled kernels in int8")
TORCH_OPERATORS = StepPath(how="torch operators")


def torch_fallback(why: str, remedy: str) -> StepPath:
    """The slow path through torch's operators, with the reason and a remedy."""
    return replace(TORCH_OPERATORS, fallback=why, remedy=remedy)


def triton_remedy(error: Exception) -> str:
    """What to do if Triton could not build kernels: it needs a C compiler, and executes files from its cache folder."""
    if isinstance(error, ModuleNotFoundError):
        return "install Triton, which comes with torch's CUDA builds for Linux (pip install triton)"
    environment = os.environ  # noqa: TID251  Triton's own settings, not ours
    if "CC" not in environment and not any(map(shutil.which, _COMPILERS)):
        return "install a C compiler (Debian: apt-get install gcc libc6-dev), or name one with CC"
    home = environment.get("TRITON_HOME") or os.path.expanduser("~")  # as Triton: there may be no home
    folder = Path(environment.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    if flaw := cache_folder_flaw(folder):
        return f"set TRITON_CACHE_DIR to a folder that can be written and executed from; {folder} {flaw}"
    return "read the error in the worker's log; compare driver and CUDA version (python -m torch.utils.collect_env)"


def cache_folder_flaw(folder: Path) -> str:
    """Why compiled code cannot be kept in `folder`, which need not exist yet; empty if it can."""
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))  # False below what may not be read
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        return "is on a file system mounted noexec"
    return "" if os.access(there, os.W_OK | os.X_OK) else "cannot be written"
