"""ModelSpec to VideoLM on its devices: standard Hugging Face folders or hub ids, safetensors only."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from vidspec_models.accelerated import make_cuda_step
from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.decoder import Decoder
from vidspec_models.errors import ModelLoadError
from vidspec_models.load_errors import require_template, require_weights, told
from vidspec_models.load_progress import OnProgress, load_bars
from vidspec_models.placement import LayerSpan, layer_spans, move
from vidspec_models.processor import multiplies_bfloat16
from vidspec_models.registry import find_family
from vidspec_models.row_invariance import PREFILL_RULE
from vidspec_models.spec import ModelSpec
from vidspec_models.synthetic.load import load_random
from vidspec_models.synthetic.recipe import find_recipe
from vidspec_models.video_lm import StepLogits, VideoLM

BUNDLED = "bundled"


def model_path(spec: ModelSpec) -> str:
    """Where the files are: the bundled half for the role, or the path or hub id as given."""
    if spec.path != BUNDLED:
        return spec.path
    return str(BUNDLED_TARGET if spec.role == "target" else BUNDLED_DRAFT)


def resolve_devices(names: str, role: str) -> tuple[torch.device, ...]:
    """One device, or several of a kind, separated by commas, for consecutive layers.

    "auto": the target takes the last CUDA device, the draft the first; CPU without CUDA. Raises ModelLoadError.
    """
    if names == "auto":
        count = torch.cuda.device_count()
        return (torch.device("cuda", count - 1 if role == "target" else 0) if count else torch.device("cpu"),)
    devices = tuple(_existing(name) for name in names.split(","))
    if len({device.type for device in devices}) > 1:
        raise ModelLoadError(f"device {names!r}: layers lie on CUDA devices or on the CPU, not on both")
    return devices


def resolve_device(name: str, role: str) -> torch.device:
    """For what runs on one device alone: transformers' own loop."""
    first, *others = resolve_devices(name, role)
    if others:
        raise ModelLoadError(f"transformers' own `generate` runs on one device here, not on {name!r}")
    return first


def _existing(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"device {name!r} is not one of cpu, cuda, cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(f"device {name!r} does not exist; CUDA devices found: {torch.cuda.device_count()}")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto": bfloat16 where the device multiplies it, float32 elsewhere.

    Measured on a CPU without the instruction, products in bfloat16 are emulated and several times slower than in
    float32; on one with it prompts take two thirds of the time and nine rows of a step as well.
    """
    if name != "auto":
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ModelLoadError(f"dtype {name!r} is not one of auto, float32, bfloat16, float16")
        return dtype
    has_bfloat16 = device.type == "cuda" or multiplies_bfloat16()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def load_model(spec: ModelSpec, tell: OnProgress = lambda _what, _fraction: None) -> VideoLM:
    """Load, fuse, measure the row rule; `tell` hears how far it is. Raises ModelLoadError naming the remedy."""
    path = model_path(spec)
    devices = resolve_devices(spec.device, spec.role)
    dtype = resolve_dtype(spec.dtype, devices[0])
    if (recipe := find_recipe(path)) is not None:
        return load_random(recipe, devices, dtype, _decoder_and_step)
    if spec.path == BUNDLED and not Path(path).exists():
        raise ModelLoadError(
            f"the bundled {spec.role} is missing from this installation; train it with: vidspec train-bundled"
        )
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its report of the weights becomes one line of ours
    with told(spec, path), load_bars(tell) as bar:
        config = transformers.AutoConfig.from_pretrained(path, revision=spec.revision, trust_remote_code=False)
        family = find_family(config.model_type)
        processor = transformers.AutoProcessor.from_pretrained(path, revision=spec.revision, trust_remote_code=False)
        require_template(processor)
        tokenizer_file(spec)
        model, report = transformers.AutoModelForImageTextToText.from_pretrained(
            path,
            revision=spec.revision,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation="sdpa",
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # so that the report names them
            output_loading_info=True,
            tqdm_class=bar,
        )
        require_weights(report)
        model = model.eval().requires_grad_(False)
        tell("compiling and measuring", None)
        language_model, head = family.language_model(model), model.lm_head
        spans = layer_spans(model, language_model, head, devices)
        move(model, language_model, spans)
        with torch.inference_mode():
            decoder, step = _decoder_and_step(language_model, head, config, spans)
    language_model.layers, model.lm_head = nn.ModuleList(), nn.Identity()  # the decoder holds the fused copies
    return VideoLM(model, processor, family, decoder, _stop_ids(model), step)


def _decoder_and_step(
    language_model: Any, lm_head: Any, config: Any, spans: Sequence[LayerSpan]
) -> tuple[Decoder, StepLogits | None]:
    """The decoder, and compiled kernels for its steps where they are made for this model and device."""
    context_length = config.get_text_config().max_position_embeddings
    kind = spans[0].device.type
    if kind == "cpu" and len(spans) == 1:
        # These compile with numba, which a GPU machine can do without.
        from vidspec_models.cpu_kernels.prompts import PromptAttention
        from vidspec_models.cpu_step import CpuStep, supports

        if supports(language_model):
            attend_chunk = PromptAttention() if lm_head.weight.dtype is torch.bfloat16 else None
            rule = replace(PREFILL_RULE, attend_chunk=attend_chunk)
            decoder = Decoder(language_model, lm_head, context_length, row_rule=rule)
            return decoder, CpuStep(language_model, lm_head, decoder)
    decoder = Decoder(language_model, lm_head, context_length, releases_layers=True, spans=spans)
    return decoder, make_cuda_step(decoder) if kind == "cuda" else None


def tokenizer_file(spec: ModelSpec) -> str:
    """The local path of the model's `tokenizer.json`, for processes that only detokenise."""
    path = transformers.utils.cached_file(model_path(spec), "tokenizer.json", revision=spec.revision)
    if path is None:
        raise ModelLoadError(f"{spec.role} model {spec.path!r} has no tokenizer.json (fast tokenizer)")
    return str(path)


def library_versions() -> dict[str, str]:
    """What the numbers of this process were made with."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def _stop_ids(model: Any) -> frozenset[int]:
    configured = model.generation_config.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset([configured] if isinstance(configured, int) else configured)
