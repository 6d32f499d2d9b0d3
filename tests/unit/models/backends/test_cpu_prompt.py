"""Prefill through compiled kernels: the reference's logits, and a step's bits, however it is chunked and threaded."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models import random_models
from tests.unit.models.random_models import FAMILIES
from vidspec_models.backends import select
from vidspec_models.backends.cpu import packing
from vidspec_models.backends.cpu.prompt import CpuPrompt
from vidspec_models.backends.cpu.step import CpuStep
from vidspec_models.backends.select import make_cpu_step
from vidspec_models.core_share import torch_threads
from vidspec_models.decoder.build import build_decoder
from vidspec_models.decoder.decoder import QueryObserver, Segment
from vidspec_models.decoder.int8 import compute_in_int8, fake_quantise, language_linears
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.decoder.measure_invariance import PREFILL_ONLY
from vidspec_models.decoder.placement import has_avx512_bf16

pytestmark = pytest.mark.unit

NUM_ROWS = 230
in_bfloat16 = pytest.mark.unit if has_avx512_bf16() else pytest.mark.slow  # emulation compiles extra kernels
DTYPES = ["float32", pytest.param("bfloat16", marks=in_bfloat16), "int8"]
build = partial(random_models.build, hidden_size=128, intermediate_size=192, max_position_embeddings=512)


class Prompts:
    """A model whose prompts and steps go through the kernels, and one prompt."""

    def __init__(self, family: str = "qwen2", dtype: str = "float32") -> None:
        self.model = model = build(family)
        if dtype == "bfloat16":
            model.bfloat16()
        if dtype == "int8":
            fake_quantise(language_linears(model.model, model.lm_head))
        with torch.inference_mode():
            self.decoder = build_decoder(model.model, model.lm_head, 512, batch_invariance=PREFILL_ONLY)
        self.step = CpuStep(model.model, model.lm_head, self.decoder, is_int8=dtype == "int8")
        self.prompt = CpuPrompt(self.step)
        self.ids = torch.randint(0, 97, (NUM_ROWS,), generator=torch.Generator().manual_seed(3))
        self.cache = KVCache(self.decoder.geometry, NUM_ROWS + 20)

    @torch.inference_mode()
    def prefill(
        self,
        chunks: Sequence[int] = (NUM_ROWS,),
        compute: Any = None,
        deepstack: Sequence[Tensor] = (),
        observer: QueryObserver | None = None,
    ) -> Tensor:
        """The prompt's last hidden rows [230, E], computed in chunks by `compute` or the kernels."""
        self.cache.truncate(0)
        found = []
        for count in chunks:
            start = self.cache.length
            rows = slice(start, start + count)
            hidden, rotary = self.decoder.weights.rows(self.ids[rows], torch.arange(NUM_ROWS)[rows])
            segment = Segment(self.cache, start, count)
            added = [each[rows] for each in deepstack]
            found.append((compute or self.prompt.prefill)(hidden, rotary, segment, added, observer, count))
            self.cache.length += count
        assert self.cache.length == NUM_ROWS
        return torch.cat(found)

    def answer(self, num_tokens: int) -> Tensor:
        """Logits of steps of two rows each after the prompt."""
        found = []
        for start in range(NUM_ROWS, NUM_ROWS + num_tokens, 2):
            found.append(self.step([start % 97, 7], [start, start + 1], [Segment(self.cache, start, 2)]))
            self.cache.length += 2
        return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_reference(family: str) -> None:
    prompts = Prompts(family)
    with torch.inference_mode():
        found = prompts.prompt.logits(prompts.prefill((100, 100, 30)))
        assert torch.allclose(found, prompts.model(prompts.ids[None]).logits[0], atol=5e-4)


@in_bfloat16
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_logits_are_as_near_the_reference_as_torchs(family: str) -> None:
    prompts = Prompts(family, "bfloat16")
    with torch.inference_mode():
        found = prompts.prompt.logits(prompts.prefill((100, 100, 30)))
        of_torch = prompts.model(prompts.ids[None]).logits[0].float()
        reference = prompts.model.float()(prompts.ids[None]).logits[0]
    assert (found - reference).abs().max() <= (of_torch - reference).abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_in_int8_logits_are_those_of_rounded_weights_and_rows(family: str) -> None:
    """Only numbers halfway between two integers may differ, since another summation order rounds them differently."""
    prompts = Prompts(family, "int8")
    with torch.inference_mode():
        found = prompts.prompt.logits(prompts.prefill((100, 100, 30)))
        of_rounded_weights = prompts.model(prompts.ids[None]).logits[0]
        compute_in_int8(language_linears(prompts.model.model, prompts.model.lm_head))
        of_both = prompts.model(prompts.ids[None]).logits[0]
    assert (found - of_both).abs().max() < 0.06
    assert (found - of_both).abs().mean() < 0.75 * (found - of_rounded_weights).abs().mean()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("chunks", [(230,), (128, 102), (1, 31, 32, 33, 133)])
def test_bits_depend_neither_on_chunks_nor_on_threads(chunks: tuple[int, ...], num_threads: int, dtype: str) -> None:
    prompts = Prompts(dtype=dtype)
    with torch_threads(1):
        alone = prompts.prefill((1,) * NUM_ROWS)
        answered = prompts.answer(10)
    with torch_threads(num_threads):
        assert torch.equal(prompts.prefill(chunks), alone)
        assert torch.equal(prompts.answer(10), answered)


def test_a_prompt_does_not_wait_for_a_core_that_is_lent() -> None:
    prompts = Prompts()
    with torch_threads(2):
        found = prompts.prefill()
        prompts.decoder.cores.lend(600)
        assert torch.equal(prompts.prefill(), found)


def test_its_bits_are_those_of_steps() -> None:
    """So an answer may continue a prompt that prefill or steps have computed."""
    prompts = Prompts()
    prompts.prefill()
    answered, keys = prompts.answer(10), prompts.cache.keys.clone()
    prompts.cache.truncate(0)
    for start in range(0, NUM_ROWS, 10):
        ids = prompts.ids[start : start + 10].tolist()
        prompts.step(ids, range(start, start + 10), [Segment(prompts.cache, start, 10)])
        prompts.cache.length += 10
    assert torch.equal(prompts.answer(10), answered)
    assert torch.equal(prompts.cache.keys, keys)


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_logits_are_those_of_steps(dtype: str) -> None:
    prompts = Prompts(dtype=dtype)
    found = prompts.prompt.logits(prompts.prefill((128, 102))[-1:])
    prompts.cache.truncate(NUM_ROWS - 1)
    last = prompts.step([int(prompts.ids[-1])], [NUM_ROWS - 1], [Segment(prompts.cache, NUM_ROWS - 1, 1)])
    assert torch.equal(found, last)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-4), pytest.param("bfloat16", 0.25, marks=in_bfloat16)])
def test_rows_are_added_to_and_queries_shown_as_the_decoder_does(dtype: str, tolerance: float) -> None:
    prompts = Prompts("qwen3", dtype)
    generator = torch.Generator().manual_seed(5)
    deepstack = [torch.randn(NUM_ROWS, 128, generator=generator).to(prompts.decoder.embedding.dtype) for _ in range(2)]
    shown: dict[str, list[tuple[int, Tensor]]] = {"torch": [], "kernels": []}

    def note(name: str, layer: int, queries: Tensor) -> None:
        shown[name].append((layer, queries.clone()))

    found = {
        name: prompts.prefill((128, 102), compute, deepstack, QueryObserver(70, partial(note, name)))
        for name, compute in (("torch", prompts.decoder.prompts.prefill), ("kernels", prompts.prompt.prefill))
    }
    assert torch.allclose(found["kernels"], found["torch"].float(), atol=tolerance)
    assert not torch.allclose(found["kernels"], prompts.prefill((128, 102)), atol=tolerance)
    assert [layer for layer, _ in shown["kernels"]] == [layer for layer, _ in shown["torch"]]
    assert [len(queries) for _, queries in shown["kernels"]] == [58] * 3 + [32] * 3
    for (_, ours), (_, theirs) in zip(shown["kernels"], shown["torch"], strict=True):
        assert torch.allclose(ours, theirs.float(), atol=tolerance)


def test_the_first_layers_queries_are_shown_as_the_decoder_does() -> None:
    """DyCoke looks at one row's attention before an answer's rows: its key must be there, nothing else may change."""
    prompts = Prompts("qwen3")
    prompts.prefill()
    before = prompts.answer(2)
    hidden, rotary = prompts.decoder.weights.rows(torch.tensor([5]), torch.tensor([prompts.cache.length]))
    segment = Segment(prompts.cache, prompts.cache.length, 1)
    shown: dict[str, dict[int, Tensor]] = {"torch": {}, "kernels": {}}
    for name, compute in (("torch", prompts.decoder.prompts), ("kernels", prompts.prompt)):
        prompts.cache.keys[:, :, :, segment.start :] = 0
        compute.observe(hidden, rotary, segment, QueryObserver(0, shown[name].__setitem__), 2)
        assert (prompts.cache.keys[:2, :, :, segment.start] != 0).any(-1).all()
        assert list(shown[name]) == [0, 1]
    for layer in range(2):
        assert torch.allclose(shown["kernels"][layer], shown["torch"][layer], atol=5e-4)
    prompts.cache.truncate(NUM_ROWS)
    assert torch.equal(prompts.answer(2), before)


@pytest.mark.parametrize("num_wanted", [0, 1, 3, 100, 229])
def test_the_wanted_rows_are_those_of_all(num_wanted: int) -> None:
    """The last layer computes no output for the other rows, but still their keys and values."""
    prompts = Prompts()
    expected, keys = prompts.prefill(), prompts.cache.keys.clone()
    prompts.cache.keys.zero_()
    hidden, rotary = prompts.decoder.weights.rows(prompts.ids, torch.arange(NUM_ROWS))
    for compute in (prompts.prompt.prefill, prompts.decoder.prompts.prefill):
        found = compute(hidden, rotary, Segment(prompts.cache, 0, NUM_ROWS), (), None, num_wanted)
        assert found.shape == (num_wanted, 128)
        assert torch.allclose(found, expected[NUM_ROWS - num_wanted :], atol=5e-4)
        assert torch.allclose(prompts.cache.keys, keys, atol=5e-4)
    assert torch.equal(
        prompts.prompt.prefill(hidden, rotary, Segment(prompts.cache, 0, NUM_ROWS), (), None, num_wanted),
        expected[NUM_ROWS - num_wanted :],
    )


def test_rows_that_the_cache_never_counted_leave_no_keys_behind() -> None:
    """As of a prompt whose computation failed after these rows."""
    prompts = Prompts()
    expected, answered = prompts.prefill()[-1:], prompts.answer(2)
    prompts.cache.truncate(0)
    for ids in (prompts.ids.flip(0), prompts.ids):
        hidden, rotary = prompts.decoder.weights.rows(ids, torch.arange(NUM_ROWS))
        found = prompts.prompt.prefill(hidden, rotary, Segment(prompts.cache, 0, NUM_ROWS))
    prompts.cache.length = NUM_ROWS
    assert torch.equal(found, expected)
    assert torch.equal(prompts.answer(2), answered)


def test_the_prompts_own_rows_stay_as_they_are() -> None:
    """A request that is preempted and resumed uses the same embeddings again."""
    prompts = Prompts()
    hidden, rotary = prompts.decoder.weights.rows(prompts.ids, torch.arange(NUM_ROWS))
    before = hidden.clone()
    prompts.prompt.prefill(hidden, rotary, Segment(prompts.cache, 0, NUM_ROWS))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize(
    ("flags", "few_weights", "dtype", "expected"),
    [
        ({"avx2"}, 10**9, "float32", True),
        ({"avx2"}, 1, "float32", False),
        ({"avx2"}, 1, "int8", True),
        ({"avx2", "avx512"}, 1, "float32", True),
        ({"avx2", "avx512"}, 1, "int8", True),
        (set(), 10**9, "int8", False),
        ({"avx2", "avx512"}, 10**9, "bfloat16", False),
        ({"avx2", "avx512", "zen"}, 0, "float32", True),
        ({"avx2", "avx512", "zen"}, 0, "bfloat16", True),
    ],
)
def test_prompts_are_the_kernels_where_they_are_known_to_be_faster(
    flags: set[str], few_weights: int, dtype: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in ("avx2", "avx512"):
        monkeypatch.setattr(torch.cpu, f"_is_{flag}_supported", lambda has=flag in flags: has)
    for module in (select, packing):
        monkeypatch.setattr(module, "attends_in_bfloat16", lambda: "zen" in flags)
    for limit in ("_FEW_WEIGHTS",) if few_weights else ("_FEW_WEIGHTS", "_FEW_WEIGHTS_OF_AVX512"):
        monkeypatch.setattr(packing, limit, few_weights)
    model = build("qwen2")
    if dtype == "bfloat16":
        model.bfloat16()
        if not has_avx512_bf16():
            pytest.skip("bfloat16 has kernels only where the processor multiplies it")
    found = make_cpu_step(model.model, model.lm_head, 512, is_int8=dtype == "int8")
    assert isinstance(found, tuple)
    assert isinstance(found[0].prompts, CpuPrompt) is expected
    assert bool(found[0].weights.layers) is not expected  # weights that kernels have are not held a second time
