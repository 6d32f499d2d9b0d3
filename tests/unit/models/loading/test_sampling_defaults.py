"""What a checkpoint says about drawing its answers is read as others read it; nonsense is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from vidspec_models.errors import ModelLoadError
from vidspec_models.loading.sampling_defaults import sampling_defaults, unread_settings


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": False, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"max_new_tokens": 9, "eos_token_id": 2}, {}),
        ({"top_k": -1, "temperature": 1e-6}, {"top_k": 0, "temperature": 1e-6}),
    ],
)
def test_a_released_file_is_read_as_vllm_and_transformers_read_it(said: dict[str, Any], meant: dict[str, Any]) -> None:
    assert sampling_defaults(SimpleNamespace(generation_config=GenerationConfig(**said))) == meant


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "0.7"), ("temperature", -1), ("temperature", float("nan")), ("temperature", [0.7]),
        ("top_p", 0), ("top_p", 1.1), ("top_k", 2.5), ("top_k", -2), ("min_p", 5), ("repetition_penalty", 0),
    ],
)  # fmt: skip
def test_a_number_that_nothing_can_be_drawn_with_is_named(name: str, value: object) -> None:
    config = GenerationConfig()
    setattr(config, name, value)  # as from a file: transformers looks at numbers only when it generates
    with pytest.raises(ModelLoadError, match=f"generation_config.json has .* as {name}, which must be "):
        sampling_defaults(SimpleNamespace(generation_config=config))


def test_a_model_without_the_file_wants_nothing() -> None:
    assert sampling_defaults(SimpleNamespace()) == {}


def test_what_a_checkpoint_asks_for_in_vain_is_named_but_not_what_changes_nothing() -> None:
    idle = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "suppress_tokens": [], "max_new_tokens": 2048}
    assert unread_settings(SimpleNamespace(generation_config=GenerationConfig(**idle))) == []
    wants = {"num_beams": 4, "no_repeat_ngram_size": 1, "min_new_tokens": 1, "suppress_tokens": [7]}
    found = unread_settings(SimpleNamespace(generation_config=GenerationConfig(**wants)))
    assert found == ["min_new_tokens 1", "no_repeat_ngram_size 1", "num_beams 4", "suppress_tokens [7]"]
