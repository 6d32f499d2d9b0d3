"""Reads the language model from a checkpoint of the bundled pair, for exporters. Runs in child processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vidspec_models.loading.spec import BUNDLED, ModelSpec, model_path

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = "embed_tokens.weight"


def checkpoint_of(role: str) -> Path:
    """The folder of the bundled model with this role."""
    return Path(model_path(ModelSpec(path=BUNDLED, role=role)))


def language_config(checkpoint: Path) -> dict[str, Any]:
    """Configuration of the Qwen2 decoder, in Hugging Face's format."""
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["text_config"]
    return found


def language_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The decoder's tensors in float32, named as within the decoder: `embed_tokens.weight`, `layers.0...`."""
    from safetensors.torch import load_file

    tensors = load_file(checkpoint / "model.safetensors")
    prefix = next(name for name in tensors if name.endswith(EMBEDDING)).removesuffix(EMBEDDING)
    return {name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}
