"""ModelSpec: which model, on which device, in which precision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A Hugging Face folder or hub id and how to load it. "auto" is resolved by `loading`."""

    path: str  # local folder, hub id, or "bundled"
    role: str  # "target" | "draft": picks the half of the bundled pair
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
