"""Compiled prefill attention against torch's: equally exact, wherever rows begin and however threads share them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.models.random_models import FAMILIES, build
from vidspec_models.backends import select
from vidspec_models.backends.cpu.layers import room_for_scores
from vidspec_models.backends.cpu.packing import STRIP
from vidspec_models.backends.cpu.prompt_attention import PromptAttention
from vidspec_models.backends.select import make_cpu_step
from vidspec_models.core_share import CoreShare, torch_threads
from vidspec_models.decoder.batch_invariant_ops import attend_causally
from vidspec_models.decoder.build import build_decoder
from vidspec_models.decoder.decoder import Segment
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.decoder.measure_invariance import PREFILL_ONLY
from vidspec_models.decoder.placement import has_avx512_bf16
from vidspec_models.decoder.torch_runner import TorchRunner

pytestmark = pytest.mark.unit
T = TypeVar("T")

in_bfloat16 = pytest.mark.unit if has_avx512_bf16() else pytest.mark.slow  # emulation compiles extra kernels
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=in_bfloat16)]


def drawn(
    num_rows: int, context: int, heads: tuple[int, int], width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [n, H, D], keys and values [1, KV, context, D] in a cache with more rows, which must not be read."""
    generator = torch.Generator().manual_seed(num_rows)
    queries = torch.randn(num_rows, heads[0] + 3, width, generator=generator).to(dtype)[:, 1 : heads[0] + 1]
    cache = torch.randn(2, 1, heads[1], context + 40, width, generator=generator).to(dtype)
    cache[:, :, :, context:] = torch.nan
    return queries, cache[0, :, :, :context], cache[1, :, :, :context]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("num_rows", "context", "heads", "width"),
    [(1, 1, (1, 1), 32), (2, 2, (8, 2), 64), (100, 100, (3, 1), 64), (77, 300, (8, 2), 64), (1500, 1531, (8, 2), 32)],
)
def test_it_is_as_near_to_the_exact_one_as_torchs(
    num_rows: int, context: int, heads: tuple[int, int], width: int, num_threads: int, dtype: torch.dtype
) -> None:
    queries, keys, values = drawn(num_rows, context, heads, width, dtype)
    exact = attend_causally(queries.double(), keys.double(), values.double(), 0.2)
    with torch_threads(num_threads):
        found = PromptAttention(dtype, CoreShare())(queries, keys, values, 0.2)
    torchs = attend_causally(queries, keys, values, 0.2)
    assert found.dtype is dtype
    assert (found - exact).abs().max() <= 1.5 * (torchs - exact).abs().max() + 1e-6


@given(longest=st.integers(0, 10_000))
def test_rows_have_room_for_all_that_they_see_and_the_other_half_of_a_last_pair(longest: int) -> None:
    num_columns = room_for_scores(longest).shape[1]
    assert num_columns % STRIP == 0
    assert longest < num_columns <= longest + STRIP


@pytest.mark.slow
def test_no_kernel_of_it_writes_beyond_its_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in a separate process, in which kernels check every index."""
    code = (
        "import torch; from vidspec_models.core_share import CoreShare\n"
        "from vidspec_models.backends.cpu.prompt_attention import PromptAttention\n"
        "attention = PromptAttention(torch.float32, CoreShare())\n"
        "for n in (1, 31, 32, 33, 64, 224):\n"
        "    keys = torch.randn(1, 2, n, 32); attention(torch.randn(n, 4, 32), keys, keys, 0.1)\n"
    )
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True)


class CountedCores(CoreShare):
    """Counts the items that were split among its threads."""

    num_items = 0

    def parallel_for(self, work: Callable[[T], None], items: Iterable[T]) -> None:
        given = list(items)
        self.num_items += len(given)
        super().parallel_for(work, given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_a_long_prompt_is_parted_and_only_where_more_than_one_core_is_left(dtype: torch.dtype) -> None:
    cores = CountedCores()
    attention, long = PromptAttention(dtype, cores), drawn(1500, 1531, (8, 2), 32, dtype)
    with torch_threads(2):
        attention(*drawn(100, 131, (8, 2), 32, dtype), 0.2)
        with cores, cores:  # another computation takes the second core
            alone = attention(*long, 0.2)
        assert cores.num_items == 0
        with cores:
            assert torch.equal(attention(*long, 0.2), alone)
    assert cores.num_items == 2 * 24


@in_bfloat16
@torch.inference_mode()
def test_a_models_attention_shares_its_decoders_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "attends_in_bfloat16", lambda: False)  # there prompts are not the kernels' as a whole
    model = build("llama", hidden_size=128).to(torch.bfloat16)
    found = make_cpu_step(model.model, model.lm_head, 512, is_int8=False)
    assert isinstance(found, tuple)
    attention = found[0].batch_invariance.attend_chunk
    assert isinstance(attention, PromptAttention)
    assert attention._cores is found[0].cores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_chunks_is_as_near_the_reference_as_torchs_own(family: str, dtype: torch.dtype) -> None:
    model = build(family, hidden_size=128).to(dtype)
    ids = torch.randint(0, 97, (230,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        rounded = model(ids[None]).logits[0].float()
        rule = replace(PREFILL_ONLY, attend_chunk=PromptAttention(dtype, CoreShare()))
        decoder = build_decoder(model.model, model.lm_head, 512, batch_invariance=rule)
        cache = KVCache(decoder.geometry, 230)
        pieces = []
        for chunk in ids.split(100):  # the last chunk is as small as a step
            rows = decoder.weights.rows(chunk, torch.arange(cache.length, cache.length + len(chunk)))
            hidden = TorchRunner(decoder).forward(*rows, [Segment(cache, cache.length, len(chunk))])
            pieces.append(decoder.prompts.logits(hidden))
            cache.length += len(chunk)
        reference = model.double()(ids[None]).logits[0]
    found = torch.cat(pieces).double()
    slack = 1e-6 if dtype is torch.float32 else 0.0  # either may be closer in the last bits
    assert (found - reference).abs().max() <= 1.2 * (rounded - reference).abs().max() + slack
