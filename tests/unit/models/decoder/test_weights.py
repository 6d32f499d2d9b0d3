"""Language models that the decoder supports are computed exactly; others are refused by their configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from tests.unit.models.families.tiny_checkpoints import FAMILIES
from tests.unit.models.random_models import SIZES
from vidspec_models.decoder.build import build_decoder
from vidspec_models.decoder.decoder import Segment
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.decoder.measure_invariance import PREFILL_ONLY
from vidspec_models.decoder.torch_runner import TorchRunner
from vidspec_models.decoder.weights import context_length_of, require_supported
from vidspec_models.errors import ModelLoadError

SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e4},
    "linear": SCALED,
    "dynamic": SCALED,
    "yarn": SCALED,
    "llama3": {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LONG_ROPE = {**SCALED, "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize("kind", [tf.LlamaConfig, tf.MistralConfig, tf.Qwen2Config, tf.Qwen3Config])
def test_what_is_taken_has_the_references_logits(kind: Any, rope_type: str) -> None:
    config = kind(**SIZES, rope_parameters={"rope_type": rope_type, **ROPES[rope_type]}, sliding_window=None)
    require_supported(config)
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 97, (300,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
        decoder = build_decoder(model.model, model.lm_head, 1024, batch_invariance=PREFILL_ONLY)
        rows = decoder.weights.rows(ids, torch.arange(len(ids)))
        hidden = TorchRunner(decoder).forward(*rows, [Segment(KVCache(decoder.geometry, 300), 0, 300)])
        assert torch.allclose(decoder.prompts.logits(hidden), model(ids[None]).logits[0], atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_language_model_is_taken(family: str) -> None:
    model, _ = FAMILIES[family]()
    require_supported(model.config.get_text_config())


@pytest.mark.parametrize(
    "kind",
    [
        tf.CohereConfig,
        tf.Ernie4_5Config,
        tf.GlmConfig,
        tf.GraniteConfig,
        tf.HeliumConfig,
        tf.Lfm2Config,
        tf.Olmo2Config,
        tf.Phi3Config,
        tf.Qwen2MoeConfig,
    ],
)
def test_a_language_model_of_another_shape_is_refused_by_its_name(kind: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"language model '{kind.model_type}' is not supported; supported: llama"):
        require_supported(kind())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.Qwen2Config(rope_parameters=LONG_ROPE), "rope type 'longrope' is not supported; supported: default"),
        (tf.Qwen2Config(hidden_act="gelu"), "activation 'gelu' is not supported"),
        (tf.MistralConfig(sliding_window=64), "sliding-window"),
        (tf.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=1), "sliding-window"),
        (tf.LlamaConfig(attention_bias=True), "biases outside"),
        (tf.LlamaConfig(mlp_bias=True), "biases outside"),
        (tf.Qwen3Config(attention_bias=True), "biases outside"),
    ],
)
def test_a_setting_that_is_not_computed_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        require_supported(config)


@pytest.mark.parametrize(
    "config",
    [
        tf.Qwen2Config(attention_bias=True),
        tf.LlamaConfig(sliding_window=64),
        tf.Qwen3VLTextConfig(sliding_window=64, rope_parameters={"rope_type": "default", **ROPES["default"]}),
    ],
    ids=["biases", "window of Llama", "window of Qwen3-VL"],
)
def test_a_setting_that_means_nothing_to_a_model_is_not_asked(config: Any) -> None:
    require_supported(config)


@pytest.mark.parametrize(
    ("rope", "told", "expected"),
    [
        ({"rope_type": "yarn", **SCALED}, 256, 1024),  # as Qwen's pages have it
        ({"rope_type": "yarn", **SCALED}, 1024, 1024),  # as transformers has it
        ({"rope_type": "yarn", **SCALED, "factor": 2.5}, 1000, 1000),
        ({"rope_type": "yarn", **SCALED, "factor": None}, 1024, 1024),  # it follows from the two lengths
        ({"rope_type": "linear", **SCALED}, 256, 256),
        ({"rope_type": "default", **ROPES["default"]}, 256, 256),
    ],
)
def test_a_context_that_yarn_has_lengthened_is_that_long(rope: dict[str, Any], told: int, expected: int) -> None:
    config = tf.Qwen2Config(max_position_embeddings=told, rope_parameters=rope)
    assert context_length_of(config) == expected
