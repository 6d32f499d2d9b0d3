"""Build a Decoder from a transformers language model: measure batch invariance, fuse and place the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from vidspec_models.decoder.batch_invariant_ops import BatchInvariance
from vidspec_models.decoder.decoder import Decoder
from vidspec_models.decoder.int8_weight import Int8Product, int8_weight
from vidspec_models.decoder.kv_cache import CacheGeometry, LayerSpan
from vidspec_models.decoder.measure_invariance import StepShapes, measure_invariance
from vidspec_models.decoder.torch_runner import TorchRunner
from vidspec_models.decoder.weights import (
    DecoderWeights,
    JoinedProduct,
    fuse_all,
    joined_weight,
    linears_by_product,
    product_of,
    rotary_values,
)

LayersAre = Literal["copied", "moved", "rounded to int8", "left out"]


def build_decoder(
    language_model: Any,
    lm_head: Any,
    context_length: int,
    *,
    batch_invariance: BatchInvariance | None = None,
    layers_are: LayersAre = "copied",
    spans: Sequence[LayerSpan] = (),
) -> Decoder:
    """Build the decoder of a language model that `require_supported` accepts. Measures `batch_invariance` if not given.
    Layers that are "moved" are removed from the language model one by one as they are fused, so that no weight is held
    twice; so are layers that are "rounded to int8", whose weights and the head's are kept in eight bits. Layers and
    head are "left out" where kernels compute prompts as well as steps.
    `spans` says where the layers go; by default to the embedding's device.
    """
    config, layers = language_model.config, language_model.layers
    embedding = language_model.embed_tokens.weight.detach()
    spans = tuple(spans) or (LayerSpan(embedding.device, range(len(layers))),)
    attention, last = layers[0].self_attn, spans[-1].device
    rule = batch_invariance or _measured(language_model, lm_head, spans)
    joined = _in_eight_bits(rule) if layers_are == "rounded to int8" else _as_they_are(rule)
    fused = [] if layers_are == "left out" else fuse_all(layers, joined, spans, releases=layers_are != "copied")
    geometry = CacheGeometry(
        num_layers=len(layers),
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        dtype=rule.cache_dtype or embedding.dtype,
        device=embedding.device,
        context_block=rule.context_block,
        split=spans if len(spans) > 1 else (),
    )
    positions = torch.arange(context_length, device=embedding.device)[None]
    if hasattr(language_model.rotary_emb, "recomposition_frequencies"):  # transformers 5.17 expects three axes
        positions = positions.expand(3, 1, -1)
    weights = DecoderWeights(
        embedding=embedding,
        rotary=torch.stack(rotary_values(language_model.rotary_emb, embedding, positions), dim=1),
        layers=list(fused),
        final_norm=language_model.norm.weight.detach().to(last),
        head=None if layers_are == "left out" else joined([lm_head], last),
        eps=config.rms_norm_eps,
    )
    decoder = Decoder(weights, geometry, rule, config.num_attention_heads, attention.scaling)
    runner = TorchRunner(decoder)
    decoder.prompts, decoder.step = runner, runner.step
    return decoder


def _as_they_are(rule: BatchInvariance) -> JoinedProduct:
    return lambda linears, device: product_of(joined_weight(linears).to(device), rule)


def _in_eight_bits(rule: BatchInvariance) -> JoinedProduct:
    return lambda linears, device: Int8Product(int8_weight(linears, device), rule.max_inner)


def _measured(language_model: Any, lm_head: Any, spans: Sequence[LayerSpan]) -> BatchInvariance:
    """Measured on every device; the rule holds only if all devices agree."""
    devices = dict.fromkeys(span.device for span in spans)
    rules = [measure_invariance(_step_shapes(language_model, lm_head, device)) for device in devices]
    return replace(rules[0], holds=rules[0].holds and rules.count(rules[0]) == len(rules))


def _step_shapes(language_model: Any, lm_head: Any, device: torch.device) -> StepShapes:
    config, layers = language_model.config, language_model.layers
    head = lm_head.weight.detach().to(device)
    weights = [joined_weight(linears).to(device) for linears in linears_by_product(layers[0])]
    return StepShapes(
        weights=(*weights, head),
        num_bytes=len(layers) * sum(weight.nbytes for weight in weights) + head.nbytes,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=layers[0].self_attn.head_dim,
    )
