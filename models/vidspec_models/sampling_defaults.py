"""How a checkpoint wants to be sampled where a request does not say: its generation_config.json, as vLLM reads it."""

from __future__ import annotations

from typing import Any

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation_config: Any) -> dict[str, float]:
    """The fields of `SamplingParams` that a transformers GenerationConfig sets, by name.

    As vLLM takes them, but for `do_sample`, which it does not read: false is greedy, as in transformers, and true
    without a temperature is temperature 1.
    """
    said = {name: getattr(generation_config, name, None) for name in _NAMES}
    found = {name: value for name, value in said.items() if value is not None}
    do_sample = getattr(generation_config, "do_sample", None)
    if do_sample is False:
        return {name: value for name, value in found.items() if name == "repetition_penalty"}
    return {"temperature": 1.0, **found} if do_sample else found
