"""What a figure was measured with: machine, versions, time. A number without these is no number."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from vidspec_service import __version__

_LIBRARIES = ("torch", "transformers")
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The processor and what of it matters to matrix products."""

    cpu: str
    cores: int  # that this process may use
    memory_gib: float
    flags: tuple[str, ...]
    has_amx: bool
    has_avx512: bool
    platform: str
    accelerators: Mapping[str, str] = field(default_factory=dict)  # device to product name


def hardware(accelerators: Mapping[str, str]) -> Hardware:
    """This machine; only the workers, which import torch, know its accelerators."""
    fields = cpu_fields(_CPU_INFO.read_text(encoding="utf-8")) if _CPU_INFO.exists() else {}
    present = set(fields.get("flags", "").split())
    return Hardware(
        cpu=fields.get("model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        flags=tuple(flag for flag in _FLAGS if flag in present),
        has_amx="amx_tile" in present,
        has_avx512="avx512f" in present,
        platform=platform.platform(),
        accelerators=dict(accelerators),
    )


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
    """Of the last minute: well above zero before a run means that others were at work."""
    return os.getloadavg()[0]


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
