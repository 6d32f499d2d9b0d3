"""Architecture name to family, imported only when asked for; a miss names what is listed."""

from __future__ import annotations

from importlib import import_module

from vidspec_models.errors import ModelLoadError
from vidspec_models.families.base import Family

_FAMILIES = {"llava_onevision": ("vidspec_models.families.llava_onevision", "LlavaOnevision")}


def find_family(model_type: str) -> Family:
    """The family of a transformers `model_type`; raises ModelLoadError for one we do not list."""
    if model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelLoadError(f"model type {model_type!r} is not supported; supported: {known}")
    module, name = _FAMILIES[model_type]
    family: Family = getattr(import_module(module), name)()
    return family
