"""Reads a checkpoint with transformers: its configuration, its processor, and its weights as a stock model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from tqdm import tqdm
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoProcessor, GenerationConfig
from transformers import __version__ as transformers_version
from transformers.utils import logging

from vidspec_models.decoder.int8 import layer_linears
from vidspec_models.decoder.placement import Precision
from vidspec_models.decoder.quantised import Quantised, make_plain, set_quantised
from vidspec_models.errors import ModelLoadError
from vidspec_models.families.conversation import roles_of_texts
from vidspec_models.loading.errors import require_template, require_weights
from vidspec_models.loading.files import INDEX, WEIGHTS, weight_files
from vidspec_models.loading.quantised import find_quantisation, read_weights


def load_config(path: str, revision: str | None) -> Any:
    """The checkpoint's configuration. Raises ModelLoadError for quantised weights that cannot be read."""
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    find_quantisation(config)
    # transformers reads this field of the outer configuration; some checkpoints have it only in the text part
    config.tie_word_embeddings = config.tie_word_embeddings or bool(
        getattr(config.get_text_config(), "tie_word_embeddings", False)
    )
    return config


def load_processor(path: str, revision: str | None) -> Any:
    """The checkpoint's processor with its chat template, which old checkpoints keep with the tokenizer.

    Raises ModelLoadError if the template cannot write a conversation about a video.
    """
    try:
        processor = AutoProcessor.from_pretrained(path, revision=revision, trust_remote_code=False)
    except RecursionError as error:  # a LLaVA-NeXT-Video saved by transformers 4.42 to 4.51 has no settings for video
        raise ModelLoadError(
            "transformers takes the image_processor_type in its preprocessor_config.json for that of a video "
            "processor which contains itself; delete that line of the file"
        ) from error
    processor.chat_template = processor.chat_template or processor.tokenizer.chat_template
    require_template(processor)
    processor.roles_of_texts = roles_of_texts(processor)
    return processor


def load_stock_model(
    path: str, revision: str | None, config: Any, precision: Precision, bar: type[tqdm] | None = None
) -> Any:
    """transformers' model on the CPU. Raises ModelLoadError if tensors are missing or have another shape.

    Downloads show their progress with `bar`. Quantised weights become plain ones, of which `config` says so afterwards.
    With int8, those of the language model's layers stay as they are (see `decoder.quantised`).
    """
    dtype = loading_dtype(config, precision)
    settings, weights = find_quantisation(config), None
    if settings is not None:
        weights = read_weights(_weight_files(path, revision, bar), settings)
        for part in (config, config.get_text_config()):
            with suppress(AttributeError):
                del part.quantization_config
    stored = _Stored(weights or {}, dtype)
    model, report = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].from_pretrained(
        path if weights is None else None,
        config=config,
        revision=revision,
        dtype=dtype,
        state_dict=None if weights is None else stored.tensors,
        use_safetensors=True,
        attn_implementation="sdpa",
        ignore_mismatched_sizes=True,  # so that the report names them
        output_loading_info=True,
        tqdm_class=bar,
    )
    require_weights(report)
    if weights is not None:
        with suppress(OSError):  # there need not be one
            model.generation_config = GenerationConfig.from_pretrained(path, revision=revision)
        layers = layer_linears(model.model.language_model) if precision.is_int8 else []
        stored.give(model, len(report["unexpected_keys"]), leaving=layers)
    return model


def _weight_files(path: str, revision: str | None, bar: type[tqdm] | None) -> list[Path]:
    """The files that hold the weights; those of a hub id are downloaded, and no others."""
    if not (folder := Path(path)).is_dir():
        fetch = partial(snapshot_download, path, revision=revision, tqdm_class=bar)
        folder = Path(fetch(allow_patterns=[WEIGHTS, INDEX]))
        fetch(allow_patterns=[str(file.relative_to(folder)) for file in weight_files(folder)])
    return weight_files(folder)


class _Stored:
    """Passes quantised weights through transformers, which may rename them: as empty tensors that are known again."""

    def __init__(self, weights: Mapping[str, Tensor | Quantised], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._by_address: dict[int, Quantised] = {}
        self.tensors = {
            name: self._stand_in(weight) if isinstance(weight, Quantised) else weight
            for name, weight in weights.items()
        }

    def _stand_in(self, weight: Quantised) -> Tensor:
        one = torch.zeros(1, dtype=self._dtype)
        self._by_address[one.data_ptr()] = weight
        return one.expand(weight.shape)

    def give(self, model: nn.Module, num_unexpected: int, leaving: Sequence[nn.Module]) -> None:
        """Give every layer its weight, as stored for those of `leaving`, else converted.

        Raises ModelLoadError if some are lost, but for tensors that the model does not have.
        """
        found = {module: self._by_address.get(_address(module)) for module in model.modules()}
        given = {module: weight for module, weight in found.items() if weight is not None}
        if len(given) + num_unexpected < len(self._by_address):
            raise ModelLoadError(
                f"transformers {transformers_version} does not keep the tensors it is given, so its quantised weights "
                "are lost; choose the checkpoint in 16 bits, or another version of transformers"
            )
        left = set(leaving)
        for module, weight in logging.tqdm(given.items(), desc="Converting weights"):
            set_quantised(module, weight)
            if module not in left:
                make_plain(module, self._dtype)


def _address(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return weight.data_ptr() if isinstance(weight, Tensor) else 0


def loading_dtype(config: Any, precision: Precision) -> torch.dtype:
    """The type to load weights in. For int8 on a CPU, a checkpoint's own 16 bits: in float32 the weights of a 7B need
    30 GB, and files in their own type are only mapped into memory.
    """
    is_half = config.dtype in (torch.bfloat16, torch.float16)
    return config.dtype if precision.is_int8 and precision.dtype is torch.float32 and is_half else precision.dtype
