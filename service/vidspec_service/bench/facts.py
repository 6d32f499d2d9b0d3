"""What a figure was measured with: machine, versions, the command. A number without these is no number."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from vidspec_service import __version__

_LIBRARIES = ("torch", "transformers")
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_CPU_INFO = Path("/proc/cpuinfo")


def hardware() -> dict[str, object]:
    """The processor, what of it matters to matrix products, and the memory."""
    fields = cpu_fields(_CPU_INFO.read_text(encoding="utf-8")) if _CPU_INFO.exists() else {}
    present = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "flags": [flag for flag in _FLAGS if flag in present],
        "has_amx": "amx_tile" in present,
        "has_avx512": "avx512f" in present,
        "platform": platform.platform(),
    }


def cpu_fields(text: str) -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo."""
    lines = text.partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def versions() -> dict[str, str]:
    """Of what runs; the commit where this is a checkout."""
    found = {"vidspec": __version__, "python": platform.python_version()}
    found.update({name: version(name) for name in _LIBRARIES})
    commit = _commit()
    return {**found, "commit": commit} if commit else found


def now() -> str:
    """The time of the run."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def load_average() -> float:
    """Of the last minute: anything near or above the number of cores before a run means that others were at work."""
    return os.getloadavg()[0]


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
