"""Load a ModelSpec into a VideoLM on its devices: standard Hugging Face folders or hub ids, safetensors only.

What would spoil every request is an error at start, not at the first request: so a loaded model is tried at once.
"""

from __future__ import annotations

import ctypes
import io
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm

from vidspec_models.backends.select import compile_cpu_tower, make_decoder
from vidspec_models.decoder.int8 import language_linears, round_layers_to_four_bits, vision_linears, widen
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.decoder.placement import Precision, layer_spans, move_to_devices, resolve_devices, resolve_precision
from vidspec_models.decoder.weights import require_supported
from vidspec_models.errors import ContextOverflow, ModelLoadError
from vidspec_models.loading.checkpoint import load_config, load_processor, load_stock_model
from vidspec_models.loading.errors import as_load_errors, require_usable
from vidspec_models.loading.files import first_line, weight_files
from vidspec_models.loading.quantised import find_quantisation
from vidspec_models.loading.sampling_defaults import sampling_defaults, unread_settings
from vidspec_models.loading.spec import ModelSpec, find_family, model_path, rounded_dtype
from vidspec_models.prompt import Prompt, pruned
from vidspec_models.request import VIDEO, Turn, Video
from vidspec_models.synthetic.model import OracleDraft, RandomFamily, random_language_model
from vidspec_models.synthetic.recipe import Recipe, find_recipe
from vidspec_models.video_lm import VideoLM, num_ids

logger = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BUFFER_BYTES, _KEPT_BYTES = 32 << 20, 128 << 20  # the first is glibc's maximum
_SPACED = "  Is it  so?\n\nYes"  # what tokenizers differ about
_QUESTION = Turn(role="user", parts=(VIDEO, "What happens?"))
_GREY = Video(
    frames=np.full((2, 60, 100, 3), 128, np.uint8),  # no square: some wrong settings spoil all others only
    source_indices=(0, 1),
    source_fps=1.0,
    source_num_frames=2,
    duration_s=2.0,
)
OnProgress = Callable[[str, float | None], None]  # the current activity; the share that is done, None if unknown


def load_model(spec: ModelSpec, on_progress: OnProgress = lambda _what, _fraction: None) -> VideoLM:
    """Load, fuse, measure batch invariance. Raises ModelLoadError with a remedy."""
    path = model_path(spec)
    devices = resolve_devices(spec.device, spec.role)
    require_usable(spec, devices)
    precision = resolve_precision(spec.dtype, devices[0], rounded_dtype=rounded_dtype(path))
    if (recipe := find_recipe(path)) is not None:
        return _load_random(recipe, devices, precision)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # `load_stock_model` tells what is wrong with the weights
    with as_load_errors(spec, path), load_bars(on_progress) as bar:
        config = load_config(path, spec.revision)
        is_on_cpu = devices[0].type == "cpu"
        if find_quantisation(config) and not precision.is_int8:
            logger.warning("quantised weights are converted; --%s-dtype int8 keeps them small", spec.role)
        family_type = find_family(config.model_type)
        require_supported(config.get_text_config())
        processor = load_processor(path, spec.revision)
        folder = Path(tokenizer_file(spec)).parent
        model = load_stock_model(path, spec.revision, config, precision, bar)
        model = model.eval().requires_grad_(False)
        on_progress("compiling and measuring", None)
        family = family_type(model, processor)
        language_model, head = family.language_model, model.lm_head
        spans = layer_spans(model, language_model, head, devices)
        move_to_devices(model, language_model, spans, is_int8=precision.is_int8)
        if precision.is_int4:
            round_layers_to_four_bits(language_model)
        if precision.is_int8 and is_on_cpu:
            widen(model, leaving=[*language_linears(language_model, head), *vision_linears(model)])
        decoder, step = make_decoder(language_model, head, config, spans, is_int8=precision.is_int8)
        decoder.dtype_name = precision.name
        if is_on_cpu:  # the tower is there, too; with a GPU the compiler is not even imported
            compile_cpu_tower(model, decoder.cores, is_int8=precision.is_int8)
        language_model.layers, model.lm_head = nn.ModuleList(), nn.Identity()  # decoder and step hold what they need
        settle_memory()
        _warn_of_files(spec, model, processor.tokenizer)
        loaded = VideoLM(family, decoder, _stop_ids(spec, model, processor.tokenizer), step)
        run_smoke_test(loaded, folder)
    return loaded


def _load_random(recipe: Recipe, devices: Sequence[torch.device], precision: Precision) -> VideoLM:
    """A model with random weights: a target with its own logits, or a draft that follows its oracle if it has one.

    All weights are made on the first device, like those of the other model of the pair, and moved from there.
    """
    model = random_language_model(recipe.shape, recipe.seed, devices[0], precision.dtype)
    spans = layer_spans(model, model.model, model.lm_head, devices)
    if precision.is_int4:
        round_layers_to_four_bits(model.model)
    decoder, step = make_decoder(model.model, model.lm_head, model.config, spans, is_int8=precision.is_int8)
    decoder.dtype_name = precision.name
    model.model.layers, model.lm_head = nn.ModuleList(), nn.Identity()
    settle_memory()
    family = RandomFamily(model, recipe)
    if recipe.oracle is not None:
        return OracleDraft(family, decoder, recipe.oracle, step)
    return VideoLM(family, decoder, frozenset(), step)


def run_smoke_test(model: VideoLM, folder: Path) -> None:
    """Raise ModelLoadError unless the model makes a prompt of a video and finite numbers from it, and its settings for
    frames and sampling can be used. The weights are in `folder`.
    """
    sampling_defaults(model.family.model)
    try:
        _ = (model.family.default_num_frames, model.family.max_frames)
        prompt = model.prepare([_QUESTION], [_GREY])
    except ContextOverflow:
        return  # a context this small has room for text alone
    except (ModelLoadError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # settings of a processor can be wrong in any way
        raise ModelLoadError(
            f"it cannot read a video: {first_line(error)}; compare the processor's settings (processor_config.json, "
            "preprocessor_config.json, video_preprocessor_config.json) with those of the checkpoint it comes from"
        ) from error
    if not _makes_numbers(model, prompt):
        why = _not_finite(folder) or f"{model.decoder.dtype_name} is too small for its numbers; choose another dtype"
        raise ModelLoadError(f"what it computes is not finite: {why}")


@torch.inference_mode()
def _makes_numbers(model: VideoLM, prompt: Prompt) -> bool:
    """Whether the video's rows and what the language model makes of the text are finite."""
    words = pruned(prompt, torch.empty(0, dtype=torch.int64, device=prompt.is_video.device))
    logits = model.prefill(words, KVCache(model.decoder.geometry, words.num_tokens), words.num_tokens)
    assert logits is not None
    found = [prompt.embeddings, logits, *([] if prompt.deepstack is None else [prompt.deepstack])]
    return all(bool(rows.isfinite().all()) for rows in found)


def _not_finite(folder: Path) -> str | None:
    """The first tensor in the files that has an infinity or a NaN, and the remedy."""
    for file in weight_files(folder):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a mapping
                if not tensors.get_tensor(name).float().isfinite().all():
                    return f"tensor {name!r} in {file.name} is damaged; download it again"
    return None


def settle_memory() -> None:
    """Give back to the system what loading has freed, then keep what forwards free.

    glibc does neither by itself. It keeps pieces below 32 MB, as most layers' weights are. And it maps larger buffers
    anew in every forward, which took a twentieth of the time to the first token, unless larger ones were freed before.
    """
    with suppress(AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BUFFER_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _stop_ids(spec: ModelSpec, model: Any, tokenizer: Any) -> frozenset[int]:
    configured = model.generation_config.eos_token_id
    if configured is None:
        configured = tokenizer.eos_token_id
        used = "the tokenizer's" if configured is not None else "none: every answer continues to max_tokens"
        logger.warning("%s names no end token in generation_config.json or config.json; using %s", spec.name, used)
    if configured is None:
        return frozenset()
    known = range(num_ids(tokenizer))
    ids = configured if isinstance(configured, list) else [configured]
    if unknown := [each for each in ids if each not in known]:
        raise ModelLoadError(
            f"generation_config.json or config.json names the end token {unknown[0]!r}, but the tokenizer has "
            f"tokens 0 to {known[-1]}; correct eos_token_id"
        )
    return frozenset(ids)


def _warn_of_files(spec: ModelSpec, model: Any, tokenizer: Any) -> None:
    """Log where answers differ from those of transformers, which reads files and fields that are not read here.

    A draft's files do not matter: the answers are the target's.
    """
    if spec.role == "draft":
        return
    if unread := unread_settings(model):
        logger.warning("%s has a generation_config.json with %s, which is not read", spec.name, ", ".join(unread))
    stored = Tokenizer.from_file(tokenizer_file(spec))
    known = {number: (token.content, token.special) for number, token in stored.get_added_tokens_decoder().items()}
    meant = {number: (token.content, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    if different := [text for number, (text, special) in meant.items() if known.get(number) != (text, special)]:
        logger.warning(
            "%s has a tokenizer.json that does not tell of token %r what other files do (tokens in all: %d): answers "
            "follow tokenizer.json; write it anew with AutoTokenizer.save_pretrained",
            spec.name,
            different[0],
            len(different),
        )
    stored.no_truncation()
    stored.no_padding()
    if stored.encode(_SPACED, add_special_tokens=False).ids != tokenizer.encode(_SPACED, add_special_tokens=False):
        logger.warning(
            "%s has a tokenizer.json that makes other tokens of a text than its tokenizer_class, which prompts follow: "
            "bad_words and /tokenize follow tokenizer.json; write it anew with AutoTokenizer.save_pretrained",
            spec.name,
        )


def tokenizer_file(spec: ModelSpec) -> str:
    """The local path of the model's `tokenizer.json`, for processes that only detokenise."""
    return str(transformers.utils.cached_file(model_path(spec), "tokenizer.json", revision=spec.revision))


def library_versions() -> dict[str, str]:
    """Versions of the libraries that this process computes with."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


@contextmanager
def load_bars(on_progress: OnProgress) -> Iterator[type[tqdm]]:
    """Inside, transformers' progress bars report to `on_progress`; yields the bar class, to be passed to downloads."""
    bar = reporting_bar(on_progress)
    previous = transformers.utils.logging.set_tqdm_hook(lambda _, args, kwargs: bar(*args, **kwargs))
    try:
        yield bar
    finally:
        transformers.utils.logging.set_tqdm_hook(previous)


def reporting_bar(on_progress: OnProgress) -> type[tqdm]:
    """A progress bar that calls `on_progress` a few times a second, from any thread, instead of drawing itself."""

    class ReportingBar(tqdm):  # type: ignore[misc]  # tqdm has no types
        monitor_interval = 0  # no monitor thread, which would refresh stalled bars

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if self.total:
                on_progress(str(self.desc).rstrip(": ").lower(), min(self.n / self.total, 1.0))
            return True

    return ReportingBar
