"""A decoder split over several devices: every tensor moves along, and DyCoke's hidden rows cross between devices.

Only one device here computes values. The device `meta` computes shapes only, which suffices to detect mixed devices: a
tensor that a layer forgot to move reaches an operation whose other tensors are on another device.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.unit.models.compression.test_pruner import LAYERS, TEXT, TOP, Walk, forward, prompt_of, random_qwen2
from vidspec_models.compression import DyCoke
from vidspec_models.compression.dycoke import KVPruner, begin_hiding, change_hidden
from vidspec_models.decoder.build import build_decoder
from vidspec_models.decoder.decoder import QueryObserver, Segment
from vidspec_models.decoder.kv_cache import KVCache, LayerSpan
from vidspec_models.decoder.measure_invariance import PREFILL_ONLY
from vidspec_models.decoder.torch_runner import TorchRunner

CPU, META = torch.device("cpu"), torch.device("meta")


class OneDevicePerOperation(TorchDispatchMode):
    """Only `to` may get tensors of two devices. Stricter than torch, which accepts some mixed operations with meta."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        assert func is torch.ops.aten._to_copy.default or len({tensor.device for tensor in tensors}) <= 1, func
        return func(*args, **(kwargs or {}))


def test_nothing_that_a_layer_needs_is_left_on_another_device() -> None:
    config = Qwen3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    spans = (LayerSpan(CPU, range(1)), LayerSpan(META, range(1, 4)))
    with torch.inference_mode(), OneDevicePerOperation():
        decoder = build_decoder(
            model.model, model.lm_head, 256, batch_invariance=PREFILL_ONLY, layers_are="moved", spans=spans
        )
        seen: dict[int, Tensor] = {}
        caches = [KVCache(decoder.geometry, 40) for _ in range(2)]
        for start, num_rows in ((0, 20), (20, 15)):
            logits = decoder.prompts.logits(
                TorchRunner(decoder).forward(
                    *decoder.weights.rows(torch.arange(2 * num_rows), torch.arange(start, start + num_rows).repeat(2)),
                    [Segment(cache, start, num_rows) for cache in caches],
                    torch.zeros(3, 2 * num_rows, 64, dtype=torch.bfloat16).unbind(0),
                    QueryObserver(0, seen.__setitem__),
                )
            )
        for cache in caches:
            cache.length = 35
        assert (logits.device, logits.shape) == (META, (30, 97))
        assert [seen[layer].device for layer in range(4)] == [CPU, META, META, META]
        assert [caches[0].keys_of(range(layer, layer + 1)).device for layer in range(4)] == [CPU, META, META, META]
        begun = KVCache(decoder.geometry, 35)
        begun.copy_rows(caches[0], 35)
        begun.resize(100)
        begin_hiding(begun, torch.tensor([2, 3]), 2, 10, torch.zeros(8))
        assert begun.hidden is not None
        change_hidden(begun, begun.hidden, torch.tensor([3, 7]), torch.zeros(8))
        assert decoder.step([1, 2], [35, 36], [Segment(begun, 35, 2)]).device == META
        assert not any(True for _ in model.model.layers.parameters())


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_a_forward_over_the_first_layers_stops_there_wherever_they_lie(num_layers: int) -> None:
    decoder = walks((LayerSpan(CPU, range(2)), LayerSpan(CPU, range(2, LAYERS))))[1].decoder
    seen: list[int] = []
    with torch.inference_mode():
        TorchRunner(decoder).forward(
            decoder.embedding[:1],
            decoder.prompt_rotary(1),
            [Segment(KVCache(decoder.geometry, 1), 0, 1)],
            observer=QueryObserver(0, lambda layer, _: seen.append(layer)),
            num_layers=num_layers,
        )
    assert seen == list(range(num_layers))


def walks(spans: tuple[LayerSpan, ...]) -> tuple[Walk, Walk]:
    """The same model on one device and split."""
    stock: Qwen2ForCausalLM = random_qwen2()
    with torch.inference_mode():
        whole = build_decoder(stock.model, stock.lm_head, 1024)
        split = build_decoder(stock.model, stock.lm_head, 1024, batch_invariance=whole.batch_invariance, spans=spans)
    return Walk(whole, whole.step), Walk(split, split.step)


@pytest.mark.parametrize("ends", [(1, 4), (2,), (3,)], ids=["within a place", "between places", "within the first"])
def test_hidden_rows_are_hidden_wherever_their_layers_lie(ends: tuple[int, ...]) -> None:
    edges = (0, *ends, LAYERS)
    spans = tuple(LayerSpan(CPU, range(start, stop)) for start, stop in itertools.pairwise(edges))
    prompt, made = prompt_of(300), walks(spans)
    pruner = KVPruner.of(prompt, DyCoke(layer=TOP, hide_ratio=0.9), LAYERS)
    assert pruner is not None
    ids = torch.randint(0, 97, (prompt.num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    caches = [KVCache(walk.decoder.geometry, 400) for walk in made]
    for walk, cache in zip(made, caches, strict=True):
        forward(walk, cache, ids, None)
    choices = set()
    for at in range(0, 64, 4):
        logits = [forward(walk, cache, TEXT[at : at + 4], pruner) for walk, cache in zip(made, caches, strict=True)]
        assert torch.equal(*logits)
        hidden = [cache.hidden for cache in caches]
        assert hidden[0] is not None
        assert hidden[1] is not None
        assert torch.equal(hidden[0].order, hidden[1].order)
        choices.add(tuple(hidden[0].order[: hidden[0].count].tolist()))
    assert len(choices) > 1, "the choice never moved"
