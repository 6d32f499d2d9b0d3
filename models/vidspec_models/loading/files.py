"""Finds what is wrong with a checkpoint's files. Needs no torch, so that a bad folder is refused at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vidspec_models.errors import ModelLoadError
from vidspec_models.loading.spec import require_family

NEEDED = "a checkpoint has config.json, *.safetensors, tokenizer.json, a processor's settings and a chat template"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OWN_CODE = "brings its own code, which is never run; choose one in transformers' layout (InternVL: ids ending in -hf)"
_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_OTHER_JSON = ("generation_config.json", *_TOKENIZER, *_PROCESSORS, "chat_template.json")
ADAPTER = "adapter_config.json"  # as peft saves it; transformers without peft silently answers with the base model
HAS_ADAPTER = (
    f"has an adapter ({ADAPTER}), which is never applied; merge it into its base model (merge_and_unload "
    f"of peft) and name that folder, or delete {ADAPTER} if the weights are merged"
)
_LFS = b"version https://git-lfs"


def find_flaw(folder: Path) -> str | None:
    """The first thing that is wrong with a folder's files, as a phrase that follows the model's name."""
    try:
        if (folder / ADAPTER).is_file():
            return HAS_ADAPTER
        if not (folder / "config.json").is_file():
            return f"has no config.json: it is not a checkpoint, or its download is not complete ({NEEDED})"
        return (
            _wrong_config(folder / "config.json")
            or _wrong_index(folder)
            or _wrong_weights(folder)
            or _missing_words(folder)
            or _damaged_json(folder)
        )
    except OSError as error:
        return f"has a file that cannot be read: {first_line(error)}"


def _wrong_config(file: Path) -> str | None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        require_family(str(config["model_type"]))
    except (ValueError, KeyError, TypeError):
        return "has a config.json that is not JSON with a model_type; download it again"
    except ModelLoadError as error:
        return OWN_CODE if "auto_map" in config else f"cannot be served: {error}"
    return None


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, chosen as transformers does: others may lie beside them."""
    whole = folder / WEIGHTS
    return [whole] if os.path.lexists(whole) else [folder / name for name in _named(_index(folder))]


def _index(folder: Path) -> dict[str, Any]:
    """What the index says; a folder without one has no other files than `WEIGHTS`."""
    file = folder / INDEX
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"weight_map": {}}
    return found


def _named(index: Mapping[str, Any]) -> list[str]:
    """The files that an index names."""
    return sorted(set(map(str, index["weight_map"].values())))


def _wrong_index(folder: Path) -> str | None:
    """Beside whole weights it is not read: `save_pretrained` leaves that of earlier files there."""
    if os.path.lexists(folder / WEIGHTS):
        return None
    try:
        index = _index(folder)
        named = _named(index)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"has a {INDEX} that is not JSON with a weight_map; download it again"
    if missing := [name for name in named if not (folder / name).is_file()]:
        return (
            f"is only partly downloaded: {missing[0]} is missing ({len(missing)} of {len(named)} files); "
            "download it again"
        )
    if named and "metadata" not in index:
        return f'has a {INDEX} without metadata, which transformers wants; add "metadata": {{}} to it'
    return None


def _wrong_weights(folder: Path) -> str | None:
    files = weight_files(folder)
    if not files:
        has_pickles = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        why = (
            "weights only as pickles, which are never read; convert them to" if has_pickles else "no weights; it needs"
        )
        return f"has {why} *.safetensors ({WEIGHTS}, or files that {INDEX} names)"
    for file in files:
        with file.open("rb") as opened:  # errors of `open` name the file, those of safetensors may not
            if opened.read(len(_LFS)) == _LFS:
                return f"has a Git LFS pointer instead of {file.name}; run: git lfs pull"
        try:
            with safe_open(str(file), framework="np"):
                pass
        except SafetensorError as error:
            return f"has a damaged or incomplete file: {file.name} ({first_line(error)}); download it again"
    return None


def _missing_words(folder: Path) -> str | None:
    if not (folder / "tokenizer.json").is_file():
        return (
            "has no tokenizer.json; download it again, or convert a slow tokenizer with AutoTokenizer.save_pretrained"
        )
    if not any((folder / name).is_file() for name in _PROCESSORS):
        return f"has none of {', '.join(_PROCESSORS)}; download it again"
    return None


def _damaged_json(folder: Path) -> str | None:
    """transformers does not name most of these files, and silently ignores a generation_config.json that is damaged."""
    for file in (folder / name for name in _OTHER_JSON):
        try:
            content = json.loads(file.read_text(encoding="utf-8") if file.is_file() else "{}")
        except ValueError:
            content = None
        if not isinstance(content, dict):
            return f"has a {file.name} that is not a JSON object; download it again"
    return None


def first_line(error: Exception) -> str:
    """The first line of an exception's message, and the next if it ends in a colon; the type if there is none."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    shown = [first, *others[:1]] if first.endswith(":") else [first]
    return " ".join(line.strip() for line in shown)
