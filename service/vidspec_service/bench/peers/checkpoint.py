"""The language model in a checkpoint of the bundled pair, for exporters. Runs in child processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vidspec_models.loading.spec import BUNDLED, ModelSpec, model_path

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDING = "embed_tokens.weight"


def checkpoint_of(role: str) -> Path:
    """Where the bundled model of this role lies."""
    return Path(model_path(ModelSpec(path=BUNDLED, role=role)))


def language_config(checkpoint: Path) -> dict[str, Any]:
    """Of the Qwen2 decoder, as Hugging Face writes it."""
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["text_config"]
    return found


def language_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """In float32, under the names that they have within the decoder: `embed_tokens.weight`, `layers.0...`."""
    from safetensors.torch import load_file

    tensors = load_file(checkpoint / "model.safetensors")
    prefix = next(name for name in tensors if name.endswith(_EMBEDDING)).removesuffix(_EMBEDDING)
    return {name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}


def input_table(checkpoint: Path) -> Any:
    """[vocabulary, hidden size] of numpy: what a token's id is put in as."""
    return language_tensors(checkpoint)[_EMBEDDING].numpy()
