"""Compression applies to requests that ask for it, uses the server's parameters, and limits a forward's rows."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.requests import request_of, target_request
from tests.unit.models.compression.prompts import video_prompt
from vidspec_models.compression import REFRESH_TOKENS, DyCoke
from vidspec_models.decoder.kv_cache import CacheGeometry, HiddenRows, KVCache
from vidspec_models.request import Compression, SpeculationMode
from vidspec_service.engine.speculation.plan import Plan
from vidspec_service.engine.target.request import TargetRequest, pruner_of

GEOMETRY = CacheGeometry(
    num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"), context_block=4
)
PLAIN = request_of()
DYCOKE = request_of(compression=Compression.DYCOKE)
LAYERS = 8


def test_a_request_that_asks_for_nothing_keeps_all_of_its_keys() -> None:
    assert pruner_of(DyCoke(), PLAIN, video_prompt(8, 2, 2), LAYERS) is None


def test_a_request_that_asks_for_it_gets_the_servers_ratio() -> None:
    pruner = pruner_of(DyCoke(hide_ratio=0.5), DYCOKE, video_prompt(8, 2, 2), LAYERS)
    assert pruner is not None
    assert pruner.num_hidden == 16


def test_hiding_can_be_off() -> None:
    prompt = video_prompt(8, 2, 2)
    assert pruner_of(DyCoke(merge_ratio=0.0, hide_ratio=0.5), DYCOKE, prompt, LAYERS) is not None
    assert pruner_of(DyCoke(merge_ratio=0.5, hide_ratio=0.0), DYCOKE, prompt, LAYERS) is None


def running(num_committed: int, *, is_compressed: bool) -> TargetRequest:
    """A decoding request with more proposals than a forward can verify."""
    prompt = video_prompt(8, 2, 2)
    pruner = pruner_of(DyCoke(), DYCOKE if is_compressed else PLAIN, prompt, LAYERS)
    stored = KVCache(GEOMETRY, 400)
    stored.length = prompt.num_tokens + num_committed - 1
    mode = SpeculationMode.PARALLEL
    found = target_request(prompt, stored, mode=mode, max_tokens=200, committed=[1] * num_committed, pruner=pruner)
    speculation = found.speculation
    speculation.plan = Plan(min_draft_tokens=30, max_draft_tokens=30, max_lead=60, speedup=2.0)
    speculation.chain.extend(1, num_committed, (1,) * 40, (0.999,) * 40, found.committed)
    speculation.is_followed = True
    return found


@pytest.mark.parametrize("num_committed", range(1, 2 * REFRESH_TOKENS + 2))
def test_a_forward_ends_where_a_selection_ends_and_nobody_waits_for_more(num_committed: int) -> None:
    found = running(num_committed, is_compressed=True)
    first = num_committed - 1  # the forward's first answer row
    last = first + len(found.pending())
    assert first // REFRESH_TOKENS == last // REFRESH_TOKENS
    assert (last + 1) % REFRESH_TOKENS == 0
    assert found.has_enough
    assert found.rows(found.pending()).pruner is found.pruner


def test_rows_that_are_out_of_order_are_not_lent() -> None:
    found = running(5, is_compressed=True)
    found.first_logits = torch.zeros(1)
    assert found.can_lend
    found.cache.hidden = HiddenRows(first_layer=0, count=1, order=torch.arange(32), attention=torch.zeros(32))
    assert not found.can_lend


@pytest.mark.parametrize("is_compressed", [True, False])
def test_tokens_are_decoded_in_one_go_only_where_no_rows_are_chosen_between_them(is_compressed: bool) -> None:
    assert running(5, is_compressed=is_compressed).can_run_ahead is not is_compressed


def test_without_compression_the_plan_alone_decides() -> None:
    assert len(running(5, is_compressed=False).pending()) == 30
