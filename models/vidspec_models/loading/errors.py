"""Why a checkpoint does not load, in one line that names the file at fault and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vidspec_models.errors import ModelLoadError
from vidspec_models.families.base import conversation
from vidspec_models.loading.spec import ModelSpec, find_family, require_model
from vidspec_models.request import VIDEO, Turn

_INDEX = "model.safetensors.index.json"
_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_LFS = b"version https://git-lfs"
_OWN_TEMPLATE = "add the chat_template.jinja of the checkpoint it comes from"
_NEEDED = "a checkpoint has config.json, *.safetensors, tokenizer.json, a processor's settings and a chat template"


@contextmanager
def told(spec: ModelSpec, path: str) -> Iterator[None]:
    """Whatever goes wrong inside leaves as a ModelLoadError that begins with the model's role and name."""
    require_model(spec)
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{spec.name}: {error}") from error
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"{spec.name} does not fit device {spec.device!r}; free it, choose a smaller model, "
            "or put a target's layers on several devices (--target-device cuda:0,cuda:1)"
        ) from error
    except Exception as error:  # anybody's files: every library has its own way to fail on them
        raise ModelLoadError(f"{spec.name} {_sentence(Path(path), error)}") from error


def require_weights(report: Mapping[str, Any]) -> None:
    """Refuse what transformers would fill in with random numbers. `report` is its loading info."""
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        raise ModelLoadError(
            f"tensor {missing[0]!r} is in none of its files (missing in all: {len(missing)}); "
            "fetch it again, or choose weights made for its config.json"
        )
    if mismatched:
        name, found, wanted = mismatched[0]
        if name.endswith(_VOCABULARY) and found[1:] == wanted[1:]:
            raise ModelLoadError(
                f"tensor {name!r} has {found[0]} rows, config.json a vocab_size of {wanted[0]}; if tokens were added "
                f"in fine-tuning, set vocab_size (of text_config, too) to {found[0]}"
            )
        raise ModelLoadError(
            f"tensor {name!r} has shape {list(found)}, config.json wants {list(wanted)}; "
            "weights and configuration are not of one checkpoint"
        )


def require_template(processor: Any) -> None:
    """A conversation about a video must be put into words, or the first request would find that it cannot."""
    if getattr(processor, "chat_template", None) is None:
        raise ModelLoadError(f"no chat template; {_OWN_TEMPLATE}")
    asked = conversation(processor, [Turn(role="user", parts=(VIDEO, "What happens?"))])
    try:
        text = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a program of anybody's
        raise ModelLoadError(f"its chat template fails: {_first_line(error)}; {_OWN_TEMPLATE}") from error
    if processor.video_token not in text:
        raise ModelLoadError(f"its chat template has no {processor.video_token} for a video; {_OWN_TEMPLATE}")


def require_plain_weights(config: Any) -> None:
    """Quantised weights would be read as if they were whole, without the scales that lie beside them."""
    for part in (config, config.get_text_config()):
        if settings := getattr(part, "quantization_config", None):
            method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else settings.quant_method
            raise ModelLoadError(
                f"its weights are quantised ({getattr(method, 'value', method)}), which is not supported; "
                "choose the checkpoint in bfloat16 or float16 that they were made from"
            )


def _sentence(path: Path, error: Exception) -> str:
    if path.is_dir() and (flaw := _flaw(path)):
        return flaw
    if "custom code" in str(error):
        return (
            "brings its own code, which is never run; choose one in transformers' layout (InternVL: ids ending in -hf)"
        )
    if path.is_dir():
        return f"cannot be loaded: {_first_line(error)} ({_NEEDED})"
    if isinstance(error, SafetensorError):
        return f"has a damaged file in the hub's cache; fetch it again: hf download {path} --force-download"
    return (
        f"is no folder here, and from the hub: {_first_line(error)} Check id, revision, access (hf auth login) and "
        f"network, or fetch it where there is one (hf download {path} --local-dir FOLDER) and name the folder"
    )


def _flaw(folder: Path) -> str | None:
    """The first thing that is wrong with a folder's files."""
    if not (folder / "config.json").is_file():
        return f"has no config.json: not a checkpoint, or its download has not ended ({_NEEDED})"
    return _wrong_config(folder / "config.json") or _wrong_weights(folder) or _missing_words(folder)


def _wrong_config(file: Path) -> str | None:
    try:
        find_family(str(json.loads(file.read_text(encoding="utf-8"))["model_type"]))
    except (ValueError, KeyError, TypeError):
        return "has a config.json that is not JSON with a model_type; fetch it again"
    except ModelLoadError as error:
        return f"cannot be served: {error}"
    return None


def _wrong_weights(folder: Path) -> str | None:
    index = folder / _INDEX
    named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    if missing := sorted(name for name in named if not (folder / name).is_file()):
        return f"is downloaded in part: {missing[0]} is missing (in all {len(missing)} of {len(named)}); fetch it again"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        has_pickles = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        why = "only as pickles, which are never read; convert them to" if has_pickles else "nowhere; it needs"
        return f"has its weights {why} *.safetensors"
    for file in files:
        try:
            with safe_open(str(file), framework="pt"):
                pass
        except SafetensorError as error:
            with file.open("rb") as opened:
                if opened.read(len(_LFS)) == _LFS:
                    return f"has a Git LFS pointer in the place of {file.name}; run: git lfs pull"
            return f"has a damaged file, or one downloaded in part: {file.name} ({_first_line(error)}); fetch it again"
    return None


def _missing_words(folder: Path) -> str | None:
    if not (folder / "tokenizer.json").is_file():
        return "has no tokenizer.json; fetch it again, or convert a slow tokenizer with AutoTokenizer.save_pretrained"
    if not any((folder / name).is_file() for name in _PROCESSORS):
        return f"has none of {', '.join(_PROCESSORS)}; fetch it again"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].strip() or type(error).__name__
