"""RelevanceMeter: measures once and only for a draft that reads it; sends again to a draft that connects later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.unit.engine.counting_model import configure
from tests.unit.engine.requests import request_of, target_request
from vidspec_models.decoder.kv_cache import CacheGeometry, HiddenRows, KVCache
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.preservation.text_queries import TextQueries
from vidspec_models.prompt import Prompt
from vidspec_models.request import Preservation, SpeculationMode
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Relevance
from vidspec_service.engine.ipc.payload import CellScores, read_scores
from vidspec_service.engine.target.draft_link import DraftLink, RelevanceMeter
from vidspec_service.engine.target.request import TargetRequest

GEOMETRY = CacheGeometry(
    num_layers=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu"), context_block=8
)
CELLS, TEXT = 20, 3


class Model:
    """The part of a VideoLM that is used here."""

    class decoder:
        geometry = GEOMETRY
        scale = 1.0


def running_of(mode: SpeculationMode = SpeculationMode.PARALLEL, num_cells: int = CELLS) -> TargetRequest:
    num_rows = num_cells + TEXT
    rows = torch.arange(float(num_rows)).view(-1, 1, 1)
    cache = KVCache(GEOMETRY, num_rows + 8)
    cache.keys.normal_(generator=torch.Generator().manual_seed(0))
    prompt = Prompt(
        ids=tuple(range(num_rows)),
        embeddings=torch.zeros(num_rows, 4),
        rotary=(rows, rows),
        is_video=torch.arange(num_rows) < num_cells,
        next_position=num_rows,
        grid=torch.cartesian_prod(torch.arange(num_cells // 4), torch.arange(2), torch.arange(2)),
    )
    return target_request(prompt, cache, mode=mode, max_tokens=9)


def source_of(link: DraftLink, preservation: str = "hippo", ratio: float = 0.9) -> RelevanceMeter:
    config = configure("target", preservation=Preservation(preservation), prune_ratio=ratio)
    return RelevanceMeter(cast(Any, Model), config, link)


@pytest.fixture
def ends() -> Iterator[tuple[DraftLink, Channel]]:
    ours, theirs = Channel.pair()
    link = DraftLink()
    link.connect(ours)
    yield link, theirs
    link.disconnect()
    theirs.close()


def prefill(source: RelevanceMeter, running: TargetRequest, chunk: int = 100) -> None:
    """Prefill as the loop does, with queries of the right shape."""
    generator = torch.Generator().manual_seed(1)
    while running.cache.length < running.prompt.num_tokens:
        num_rows = min(chunk, running.prompt.num_tokens - running.cache.length)
        observer = source.observer(running, num_rows)
        for layer in range(GEOMETRY.num_layers if observer else 0):
            assert observer is not None
            observer.note(layer, torch.randn(num_rows, 4, 8, generator=generator)[observer.first :])
        running.cache.length += num_rows


def told(theirs: Channel) -> list[CellScores]:
    found = []
    while (received := theirs.receive()) is not None:
        message, fds = received
        assert isinstance(message, Relevance)
        found.append(read_scores(message, fds[0]))
    return found


@pytest.mark.parametrize("chunk", [100, 21, 1])
def test_scores_are_told_once_the_prompt_is_read(ends: tuple[DraftLink, Channel], chunk: int) -> None:
    link, theirs = ends
    source, running = source_of(link), running_of()
    prefill(source, running, chunk)
    assert told(theirs) == []
    assert running.text_queries is not None
    assert sum(map(len, running.text_queries._noted[0])) == TEXT, "what each chunk has is kept"
    source.measure(running)
    (scores,) = told(theirs)
    assert scores.values.shape == (CELLS,)
    assert float(scores.values.max()) == 1.0
    source.measure(running)
    assert told(theirs) == [], "measured once"
    running.cache.length = 0
    assert source.observer(running, CELLS + TEXT) is None, "nor when it has lost its room"


def test_once_compression_has_moved_rows_nothing_is_measured(ends: tuple[DraftLink, Channel]) -> None:
    link, theirs = ends
    source, running = source_of(link), running_of()
    prefill(source, running)
    running.cache.hidden = HiddenRows(first_layer=0, count=1, order=torch.arange(4), attention=torch.zeros(4))
    source.measure(running)
    assert told(theirs) == []


def test_a_later_draft_is_told_the_same(ends: tuple[DraftLink, Channel]) -> None:
    link, theirs = ends
    open_before = len(os.listdir("/proc/self/fd"))
    source, running = source_of(link), running_of()
    prefill(source, running)
    source.measure(running)
    source.send(running)
    first, second = told(theirs)
    assert np.array_equal(first.values, second.values)
    assert len(os.listdir("/proc/self/fd")) == open_before
    source.send(running_of())
    assert told(theirs) == [], "nothing is known of that one"


@pytest.mark.parametrize(
    ("preservation", "ratio", "mode", "is_connected"),
    [
        ("uniform", 0.9, SpeculationMode.PARALLEL, True),
        ("none", 0.9, SpeculationMode.PARALLEL, True),
        ("hippo", 0.0, SpeculationMode.PARALLEL, True),
        ("hippo", 0.9, SpeculationMode.OFF, True),
        ("hippo", 0.9, SpeculationMode.PARALLEL, False),
    ],
)
def test_nothing_is_noted_where_nobody_would_read_it(
    ends: tuple[DraftLink, Channel], preservation: str, ratio: float, mode: SpeculationMode, is_connected: bool
) -> None:
    link, theirs = ends
    source, running = source_of(link if is_connected else DraftLink(), preservation, ratio), running_of(mode)
    assert source.observer(running, CELLS + TEXT) is None
    running.cache.length = CELLS + TEXT
    source.measure(running)
    assert told(theirs) == []


def test_a_request_may_have_a_draft_that_looks_at_attention_where_others_do_not() -> None:
    asked = replace(request_of(), preservation=Preservation.HIPPO, prune_ratio=0.5)
    for preservation, ratio in (("uniform", 0.9), ("hippo", 0.0)):
        source = source_of(DraftLink(), preservation, ratio)
        assert source.law_of(request_of()) is None
        assert source.law_of(asked) == STRATEGIES["hippo"].relevance


def test_where_no_cell_is_looked_at_all_are_as_good(
    ends: tuple[DraftLink, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, theirs = ends
    source, running = source_of(link), running_of()
    prefill(source, running)
    monkeypatch.setattr(TextQueries, "relevance", lambda *_: torch.zeros(CELLS))
    source.measure(running)
    (scores,) = told(theirs)
    assert scores.values.tolist() == [0.0] * CELLS


def test_a_request_that_lost_its_room_again_is_measured_when_it_comes_back(ends: tuple[DraftLink, Channel]) -> None:
    link, theirs = ends
    source, running = source_of(link), running_of()
    prefill(source, running)
    running.cache.length = 0
    source.measure(running)
    assert told(theirs) == []
    prefill(source, running)
    source.measure(running)
    assert len(told(theirs)) == 1


@pytest.mark.parametrize("is_measured", [False, True])
def test_another_answer_to_the_same_prompt_is_told_the_same(ends: tuple[DraftLink, Channel], is_measured: bool) -> None:
    """Also if the draft was not asked to follow the first answer, so that nothing was measured for it."""
    link, theirs = ends
    source, sibling, another = source_of(link), running_of(), running_of()
    prefill(source, sibling)
    if is_measured:
        source.measure(sibling)
    another.cache.length = sibling.cache.length
    source.copy(another, sibling)
    source.measure(another)
    source.measure(sibling)
    first, second = told(theirs)
    assert np.array_equal(first.values, second.values)


def test_a_prompt_without_video_is_no_trouble(ends: tuple[DraftLink, Channel]) -> None:
    link, theirs = ends
    source, running = source_of(link), running_of(num_cells=0)
    prefill(source, running)
    source.measure(running)
    assert told(theirs) == []
