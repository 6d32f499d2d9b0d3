"""How a checkpoint would have its answers drawn, for requests that do not say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from vidspec_models.errors import ModelLoadError

# Fields that a checkpoint may set: which values they may have, in words and as a test.
_FROM_CHECKPOINT: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("0 or more", lambda value: value >= 0),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("a whole number, 0 or more", lambda value: value >= 0 and value == int(value)),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("above 0", lambda value: value > 0),
}

# Fields with which transformers would write other answers, and the number with which each changes nothing, if one does;
# vLLM does not read them either.
_UNREAD: Mapping[str, float | None] = {
    "bad_words_ids": None, "begin_suppress_tokens": None, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "guidance_scale": 1, "min_length": 0,
    "min_new_tokens": 0, "no_repeat_ngram_size": 0, "num_beams": 1, "sequence_bias": None, "stop_strings": None,
    "suppress_tokens": None, "top_h": 1, "typical_p": 1,
}  # fmt: skip


def unread_settings(model: Any) -> list[str]:
    """What a checkpoint's `generation_config.json` asks for and does not get."""
    said = ((name, getattr(model.generation_config, name, None), idle) for name, idle in _UNREAD.items())
    return [f"{name} {value!r}" for name, value, idle in said if value not in (None, [], {}, idle)]


def sampling_defaults(model: Any) -> dict[str, float]:
    """A checkpoint's sampling defaults for requests that leave them out: fields of `SamplingParams`, by name.

    Read from a transformers model's GenerationConfig as vLLM does, except that vLLM ignores `do_sample`: here false
    means greedy, as in transformers, and true without a temperature means temperature 1. Raises ModelLoadError for a
    value that no answer could be drawn with.
    """
    generation_config = getattr(model, "generation_config", None)
    said = {name: getattr(generation_config, name, None) for name in _FROM_CHECKPOINT}
    found = {name: _meant(name, value) for name, value in said.items() if value is not None}
    do_sample = getattr(generation_config, "do_sample", None)
    if do_sample is False:
        return {name: value for name, value in found.items() if name == "repetition_penalty"}
    return {"temperature": 1.0, **found} if do_sample else found


def _meant(name: str, value: Any) -> float:
    if name == "top_k" and value == -1:
        return 0  # off, as for vLLM
    wanted, is_fine = _FROM_CHECKPOINT[name]
    if not isinstance(value, int | float) or not math.isfinite(value) or not is_fine(value):
        raise ModelLoadError(f"generation_config.json has {value!r} as {name}, which must be {wanted}; correct it")
    return int(value) if name == "top_k" else value
