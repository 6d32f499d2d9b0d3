"""The environment of a run: machine, versions, models, time. Figures mean nothing without it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from vidspec_models.request import SpeculationMode
from vidspec_service import __version__
from vidspec_service.engine.cgroups import num_cores
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.workers import share_cores, worker_configs

if TYPE_CHECKING:
    from vidspec_models.video_lm import VideoLM

_LIBRARIES = ("torch", "transformers")
_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
)  # fmt: skip
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How figures were made, recorded before measuring. A load well above 0 means other processes were running."""

    command: str = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    load_average: float = 0.0

    @classmethod
    def now(cls, command: str) -> Provenance:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(command=command, created=created, versions=versions(), load_average=os.getloadavg()[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The device and number format of a loaded model; `of` needs a process that imports torch."""

    device: str
    dtype: str
    device_name: str = ""  # of the accelerator; empty on CPU
    rows_are_invariant: bool = True

    @classmethod
    def of(cls, model: VideoLM) -> Placement:
        import torch

        geometry = model.decoder.geometry
        is_cuda = geometry.device.type == "cuda"
        return cls(
            device=geometry.device_names,
            dtype=model.decoder.dtype_name,
            device_name=torch.cuda.get_device_name(geometry.device) if is_cuda else "",
            rows_are_invariant=model.decoder.batch_invariance.holds,
        )

    def facts(self, model: str, threads: int) -> dict[str, Any]:
        """A model and where it ran, as reports state it."""
        return {"model": model, "device": self.device, "dtype": self.dtype, "threads": threads}


def hardware(*placements: Placement) -> dict[str, Any]:
    """This machine, including the accelerators that these models ran on."""
    fields = cpu_fields(_CPU_INFO.read_text(encoding="utf-8")) if _CPU_INFO.exists() else {}
    present = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": num_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "flags": [flag for flag in _FLAGS if flag in present],  # those that matter to matrix products
        "platform": platform.platform(),
        "accelerators": {each.device: each.device_name for each in placements if each.device_name},
    }


def cpu_fields(text: str) -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo."""
    lines = text.partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def versions() -> dict[str, str]:
    """Versions of vidspec, Python and libraries; also the commit if git tracks this code.

    An installed package may lie in a folder of a repository that is not its own.
    """
    found = {"vidspec": __version__, "python": platform.python_version()}
    found.update({name: version(name) for name in _LIBRARIES})
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return {**found, "commit": _git("describe", "--always", "--dirty", "--abbrev=12")}
    except (OSError, subprocess.SubprocessError):
        return found


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def threads_of(config: EngineConfig) -> dict[str, int]:
    """The number of threads that the engine gives each worker, by role."""
    return share_cores(worker_configs(config), num_cores())


def target_only_config(pair: EngineConfig) -> EngineConfig:
    """The same target without a draft and with all cores: the baseline of speed-ups."""
    return replace(pair, target=replace(pair.target, threads=None), draft=None, speculation=SpeculationMode.OFF)
