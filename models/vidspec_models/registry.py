"""Architecture name to family, imported only when asked for; a miss names what is listed."""

from __future__ import annotations

from importlib import import_module

from vidspec_models.errors import ModelLoadError
from vidspec_models.families.base import Family

_FAMILIES = {
    "internvl": ("vidspec_models.families.internvl", "InternVL"),
    "llava_next_video": ("vidspec_models.families.llava_next_video", "LlavaNextVideo"),
    "llava_onevision": ("vidspec_models.families.llava_onevision", "LlavaOnevision"),
    "qwen2_5_vl": ("vidspec_models.families.qwen_vl", "Qwen25VL"),
    "qwen2_vl": ("vidspec_models.families.qwen_vl", "Qwen2VL"),
    "qwen3_vl": ("vidspec_models.families.qwen3_vl", "Qwen3VL"),
}


def find_family(model_type: str) -> Family:
    """The family of a transformers `model_type`; raises ModelLoadError for one we do not list."""
    if model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelLoadError(
            f"model type {model_type!r} is not supported; supported: {known} (docs/models.md names checkpoints)"
        )
    module, name = _FAMILIES[model_type]
    family: Family = getattr(import_module(module), name)()
    return family
