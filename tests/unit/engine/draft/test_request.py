"""Which cells the draft sees, and what it does when the target's attention scores arrive."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.engine.requests import request_of
from vidspec_models.decoder.kv_cache import CacheGeometry, KVCache
from vidspec_models.preservation.selection import CellSelector
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.prompt import NO_CELL, Prompt, grid_checksum
from vidspec_models.request import SamplingParams
from vidspec_models.sampling import CoupledSampler
from vidspec_service.engine.draft.request import DraftRequest, PrunedView
from vidspec_service.engine.ipc.messages import Relevance, Verdict
from vidspec_service.engine.ipc.payload import CellScores, read_scores, write_scores

CELLS = 4 * 36
KEPT = 16 + 1  # the minimum, since a tenth would be less; and the newline


@pytest.fixture
def prompt() -> Prompt:
    num_rows = 2 + CELLS + 1 + 3
    is_video = torch.zeros(num_rows, dtype=torch.bool)
    is_video[2:-3] = True
    places = torch.cartesian_prod(torch.arange(4), torch.arange(6), torch.arange(6))
    rows = torch.arange(float(num_rows)).view(-1, 1, 1)
    return Prompt(
        ids=tuple(range(num_rows)),
        embeddings=torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(0)),
        rotary=(rows, rows),
        is_video=is_video,
        next_position=num_rows,
        grid=torch.cat((places, torch.full((1, 3), NO_CELL))),
    )


def drafting_of(prompt: Prompt, strategy: str = "hippo") -> DraftRequest:
    geometry = CacheGeometry(
        num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu"), context_block=8
    )
    return DraftRequest(
        asked=request_of(),
        view=PrunedView(prompt, STRATEGIES[strategy], 0.9, seed=1),
        cache=KVCache(geometry, 256),
        sampler=CoupledSampler(SamplingParams()),
        max_tokens=50,
    )


def scores_for(prompt: Prompt, seed: int = 0) -> CellScores:
    values = np.random.default_rng(seed).random(CELLS).astype(np.float16)
    return CellScores(request_id="r", grid_checksum=grid_checksum(prompt), values=values)


def test_the_draft_sees_its_own_choice_at_once(prompt: Prompt) -> None:
    drafting = drafting_of(prompt)
    assert drafting.view.num_video_tokens == KEPT
    assert drafting.prompt.num_tokens == 2 + KEPT + 3
    assert not drafting.is_prefilled


def test_late_relevance_means_a_new_prefill_and_no_lost_token(prompt: Prompt) -> None:
    drafting = drafting_of(prompt)
    drafting.cache.length = drafting.prompt.num_tokens
    drafting.handle(Verdict(request_id="r", start=0, ids=(7, 8), max_lead=4))
    drafting.sequence.propose([9])
    drafting.cache.length += 2
    assert drafting.missing == [9]
    before = drafting.prompt
    drafting.handle(scores_for(prompt))
    assert drafting.prompt is before  # no new view while there are proposals
    assert drafting.missing == [9]
    assert drafting.refresh_view()
    assert drafting.scores is None, "they are looked at once"
    assert drafting.prompt is not before
    assert drafting.view.num_video_tokens == KEPT
    assert drafting.cache.length == 0
    assert not drafting.is_prefilled
    drafting.cache.length = drafting.prompt.num_tokens  # prefilled again
    assert drafting.missing == [7, 8, 9]
    assert (drafting.sequence.num_committed, drafting.sequence.epoch) == (2, 1)
    assert drafting.can_run


def test_the_same_relevance_again_costs_nothing(prompt: Prompt) -> None:
    drafting = drafting_of(prompt)
    drafting.handle(scores_for(prompt))
    drafting.cache.length = drafting.prompt.num_tokens
    drafting.handle(scores_for(prompt))
    assert not drafting.refresh_view()
    assert drafting.is_prefilled


def test_a_view_is_like_another_while_both_show_the_same_rows_of_one_prompt(prompt: Prompt) -> None:
    one, other = drafting_of(prompt), drafting_of(prompt)
    assert one.view.is_same_as(other.view)
    assert not one.view.is_same_as(drafting_of(replace(prompt)).view)
    one.handle(scores_for(prompt))
    assert not one.view.is_same_as(other.view)
    other.handle(scores_for(prompt))
    assert one.view.is_same_as(other.view)


def test_strategies_that_look_at_no_attention_are_not_disturbed_by_it(prompt: Prompt) -> None:
    for name in ("uniform", "random", "ttm", "unbiased", "none", "blind"):
        drafting = drafting_of(prompt, name)
        drafting.cache.length = drafting.prompt.num_tokens
        drafting.handle(scores_for(prompt))
        assert not drafting.refresh_view(), name
        assert drafting.is_prefilled, name


def test_scores_of_other_cells_are_ignored(prompt: Prompt) -> None:
    drafting = drafting_of(prompt)
    before = drafting.prompt
    fitting = scores_for(prompt)
    for values, checksum in (
        (fitting.values, fitting.grid_checksum ^ 1),
        (fitting.values[:-1], fitting.grid_checksum),
        (np.zeros(0, np.float16), fitting.grid_checksum),
    ):
        drafting.handle(CellScores(request_id="r", grid_checksum=checksum, values=values))
        assert drafting.prompt is before


@pytest.mark.parametrize(("said", "num_kept"), [((7, 8, 9), 4), ((7, 8, 1), 2)])
def test_a_verdict_cuts_the_cache_only_where_the_chain_was_wrong(
    prompt: Prompt, said: tuple[int, ...], num_kept: int
) -> None:
    drafting = drafting_of(prompt)
    drafting.handle(Verdict(request_id="r", start=0, ids=(7,), max_lead=8))
    drafting.sequence.propose([8, 9, 10, 11])
    drafting.cache.length = drafting.prompt.num_tokens + 4
    drafting.handle(Verdict(request_id="r", start=1, ids=said[1:], max_lead=8))
    assert drafting.cache.length == drafting.prompt.num_tokens + num_kept


def test_a_verdict_while_the_prompt_is_still_read_does_not_cut_it(prompt: Prompt) -> None:
    drafting = drafting_of(prompt)
    drafting.cache.length = 5
    drafting.handle(Verdict(request_id="r", start=0, ids=(7,), max_lead=4))
    assert drafting.cache.length == 5


def test_a_new_target_leaves_the_prompt_in_the_cache(prompt: Prompt) -> None:
    drafting = drafting_of(prompt)
    drafting.cache.length = drafting.prompt.num_tokens + 3
    drafting.restart()
    assert drafting.is_prefilled
    assert drafting.missing == []
    assert drafting.sequence.tokens == []


def test_a_prompt_without_video_is_seen_whole(prompt: Prompt) -> None:
    text = Prompt(
        ids=prompt.ids[:5],
        embeddings=prompt.embeddings[:5],
        rotary=(prompt.rotary[0][:5], prompt.rotary[1][:5]),
        is_video=torch.zeros(5, dtype=torch.bool),
        next_position=5,
    )
    assert PrunedView(text, STRATEGIES["hippo"], 0.9, 0).prompt is text


def test_scores_travel_in_shared_memory_and_leave_no_descriptor(prompt: Prompt) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    scores = scores_for(prompt)
    fd = write_scores(scores.values)
    found = read_scores(Relevance(request_id="r", grid_checksum=scores.grid_checksum), fd)
    assert np.array_equal(found.values, scores.values)
    assert (found.request_id, found.grid_checksum) == ("r", scores.grid_checksum)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_attention_that_is_known_from_the_start_is_chosen_by_once(
    prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = drafting_of(prompt)
    later.handle(scores_for(prompt))
    chosen, kept = list[object](), CellSelector.kept

    def noted(selection: CellSelector, relevance: Tensor | None = None) -> Tensor:
        chosen.append(relevance)
        return kept(selection, relevance)

    monkeypatch.setattr(CellSelector, "kept", noted)
    view = PrunedView(prompt, STRATEGIES["hippo"], 0.9, 1, scores_for(prompt))
    assert len(chosen) == 1
    assert view.is_same_as(later.view)
    assert not view.refine(scores_for(prompt))
