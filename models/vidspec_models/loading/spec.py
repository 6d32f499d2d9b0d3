"""Which model to load, where its files are, and which family its architecture belongs to. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.errors import ModelLoadError

if TYPE_CHECKING:
    from vidspec_models.families.base import Family

BUNDLED = "bundled"
BUNDLED_TARGET_NAME = "bundled-target"  # usable as a draft, too: "bundled" means the half for the role
_FAMILIES = {
    "internvl": ("vidspec_models.families.llava", "InternVL"),
    "llava_next_video": ("vidspec_models.families.llava", "LlavaNextVideo"),
    "llava_onevision": ("vidspec_models.families.llava", "LlavaOnevision"),
    "qwen2_5_vl": ("vidspec_models.families.qwen_vl", "Qwen25VL"),
    "qwen2_vl": ("vidspec_models.families.qwen_vl", "Qwen2VL"),
    "qwen3_vl": ("vidspec_models.families.qwen_vl", "Qwen3VL"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A Hugging Face folder or hub id and how to load it. "auto" is resolved by `placement`."""

    path: str  # local folder, hub id, "bundled" or "bundled-target"
    role: str  # "target" | "draft": picks the half of the bundled pair
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16 | int8 | int4

    @property
    def name(self) -> str:
        return f"{self.role} model {self.path!r}"


def model_path(spec: ModelSpec) -> str:
    """Where the files are: the bundled half for the role, or the path or hub id as given."""
    if spec.path == BUNDLED_TARGET_NAME or (spec.path == BUNDLED and spec.role == "target"):
        return str(BUNDLED_TARGET)
    return str(BUNDLED_DRAFT) if spec.path == BUNDLED else spec.path


def rounded_dtype(folder: str) -> str | None:
    """The integer weights with which a checkpoint does as well by measurements (docs/benchmarks.md), and is fastest.

    Of a draft, fewer bits change the speed only.
    """
    return {str(BUNDLED_TARGET): "int8", str(BUNDLED_DRAFT): "int4"}.get(folder)


def require_family(model_type: str) -> None:
    """Raises ModelLoadError for a transformers `model_type` that we do not list."""
    if model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelLoadError(
            f"model type {model_type!r} is not supported; supported: {known} (docs/models.md names checkpoints)"
        )


def find_family(model_type: str) -> type[Family]:
    """The family of a transformers `model_type`; raises ModelLoadError for one we do not list."""
    require_family(model_type)
    module, name = _FAMILIES[model_type]
    family: type[Family] = getattr(import_module(module), name)
    return family
