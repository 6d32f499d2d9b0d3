"""Errors of loading a checkpoint as one line that names the faulty file and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer

from vidspec_models.errors import ModelLoadError
from vidspec_models.families.conversation import conversation
from vidspec_models.loading.early_checks import require_model
from vidspec_models.loading.files import NEEDED, OWN_CODE, find_flaw, first_line
from vidspec_models.loading.quantised import MARKS
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import VIDEO, Turn

_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_OWN_TEMPLATE = "add the chat_template.jinja of the checkpoint it comes from"


@contextmanager
def as_load_errors(spec: ModelSpec, path: str) -> Iterator[None]:
    """Inside, every error becomes a ModelLoadError whose message begins with the model's role and name."""
    require_model(spec)
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{spec.name}: {error}") from error
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"{spec.name} does not fit device {spec.device!r}; free its memory, choose a smaller model, "
            "or split a target over several devices (--target-device cuda:0,cuda:1)"
        ) from error
    except torch.AcceleratorError as error:
        told = f"cannot be loaded: device {spec.device!r} fails with {first_line(error)}"
        raise ModelLoadError(f"{spec.name} {told}") from error
    except Exception as error:  # the files can be anything, and every library has its own errors for bad ones
        raise ModelLoadError(f"{spec.name} {_sentence(Path(path), error)}") from error


def require_usable(spec: ModelSpec, devices: Iterable[torch.device]) -> None:
    """Raise ModelLoadError for a device that does not compute: its driver is there, but may be too old, or taken."""
    for device in devices:
        try:
            torch.ones((), device=device).item()
        except RuntimeError as error:
            raise ModelLoadError(
                f"{spec.role} device {str(device)!r} cannot be used: {first_line(error)}; torch {torch.__version__} "
                "may need a newer driver or GPU, or other programs fill or reserve the GPU (nvidia-smi shows it); "
                f"choose another device, or run on the CPU (--{spec.role}-device cpu)"
            ) from error


def require_weights(report: Mapping[str, Any]) -> None:
    """Refuse missing tensors, which transformers would fill with random numbers, and scales that it would leave out.
    `report` is its loading info.
    """
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if marks := sorted(key for key in report["unexpected_keys"] if key.rpartition(".")[2] in MARKS):
        raise ModelLoadError(
            f"tensor {marks[0]!r} belongs to quantised weights, but its config.json has no quantization_config that "
            "tells how to read them; download it again, or choose the checkpoint in 16 bits"
        )
    if missing:
        raise ModelLoadError(
            f"tensor {missing[0]!r} is missing from its files ({len(missing)} missing in all); "
            "download it again, or choose weights made for its config.json"
        )
    if mismatched:
        name, found, wanted = mismatched[0]
        if name.endswith(_VOCABULARY) and found[1:] == wanted[1:]:
            raise ModelLoadError(
                f"tensor {name!r} has {found[0]} rows, but config.json a vocab_size of {wanted[0]}; "
                f"if tokens were added in fine-tuning, set vocab_size (of text_config, too) to {found[0]}"
            )
        raise ModelLoadError(
            f"tensor {name!r} has shape {list(found)}, but config.json needs {list(wanted)}; "
            "weights and configuration are from different checkpoints"
        )


def require_template(processor: Any) -> None:
    """Check that the chat template works for a conversation about a video, so that the first request does not fail."""
    if getattr(processor, "chat_template", None) is None:
        raise ModelLoadError(f"no chat template; {_OWN_TEMPLATE}")
    asked = conversation(processor, [Turn(role="user", parts=(VIDEO, "What happens?"))])
    try:
        text = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template can contain any code
        raise ModelLoadError(f"its chat template fails: {first_line(error)}; {_OWN_TEMPLATE}") from error
    if processor.video_token not in text:
        raise ModelLoadError(f"its chat template has no {processor.video_token} for a video; {_OWN_TEMPLATE}")


def _sentence(path: Path, error: Exception) -> str:
    if path.is_dir() and (found := find_flaw(path) or _no_tokenizer(path / "tokenizer.json")):
        return found
    if "custom code" in str(error):
        return OWN_CODE
    if path.is_dir():
        return f"cannot be loaded: {first_line(error)} ({NEEDED})"
    if isinstance(error, SafetensorError):
        return f"has a damaged file in the hub's cache; download it again: hf download {path} --force-download"
    return (
        f"is not a local folder, and the hub failed: {first_line(error)} Check id, revision, access (hf auth login) "
        f"and network, or download it elsewhere (hf download {path} --local-dir FOLDER) and name the folder"
    )


def _no_tokenizer(file: Path) -> str | None:
    """Called only after a failure, since a large file takes a second to read; transformers' own errors name no file."""
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no other type
        return f"has a {file.name} that is not a tokenizer's ({first_line(error)}); download it again"
    return None
