"""What a checkpoint's generation_config.json says becomes the default of requests that do not say."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from vidspec_models.sampling import sampling_defaults

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
        ({"do_sample": True, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": False, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"max_new_tokens": 9, "eos_token_id": 2}, {}),
    ],
)
def test_a_released_file_is_read_as_vllm_and_transformers_read_it(said: dict[str, Any], meant: dict[str, Any]) -> None:
    assert sampling_defaults(GenerationConfig(**said)) == meant


def test_a_model_without_the_file_wants_nothing() -> None:
    assert sampling_defaults(None) == {}
