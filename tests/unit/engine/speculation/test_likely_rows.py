"""A row is verified if it is likely to be accepted; every proposal for a position that the target chose is judged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.counting_model import CountingModel
from tests.unit.engine.requests import target_request
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.prompt import Prompt
from vidspec_models.request import SpeculationMode
from vidspec_service.engine.speculation.plan import Plan, SpeculationState, StepCosts
from vidspec_service.engine.speculation.proposals import ProposalChain
from vidspec_service.engine.target.request import TargetRequest

pytestmark = pytest.mark.unit


def running(ids: Sequence[int], confidences: Sequence[float], *, most: int = 8, least: int = 4) -> TargetRequest:
    """A request with one committed token, for which the draft proposes `ids`."""
    prompt = Prompt(
        ids=(1, 2),
        embeddings=torch.zeros(2, 4),
        rotary=(torch.zeros(2, 1, 1),) * 2,
        is_video=torch.zeros(2, dtype=torch.bool),
        next_position=2,
    )
    cache = KVCache(CountingModel.decoder.geometry, 64)
    cache.length = 2 + 1 + len(ids)
    found = target_request(prompt, cache, mode=SpeculationMode.PARALLEL, committed=[7])
    speculation = found.speculation
    speculation.plan = Plan(min_draft_tokens=least, max_draft_tokens=most, max_lead=16, speedup=2.0)
    speculation.least_likely, speculation.is_followed = 0.25, True
    speculation.chain.extend(0, 1, ids, confidences, found.committed)
    return found


def test_rows_end_before_the_first_one_that_would_hardly_count() -> None:
    assert running([1, 2, 3, 4], [0.9, 0.9, 0.3, 0.99]).pending() == [1, 2]
    assert running([1, 2, 3, 4], [0.9, 0.9, 0.9, 0.9]).pending() == [1, 2, 3, 4]
    assert running([1, 2], [0.1, 0.99]).pending() == []


def test_nobody_waits_for_proposals_behind_a_doubtful_one() -> None:
    assert not running([1, 2], [0.9, 0.9]).has_enough
    assert running([1, 2], [0.9, 0.1]).has_enough


def test_nobody_waits_for_proposals_beyond_the_end_of_an_answer() -> None:
    request = running([1, 2], [0.9, 0.9])
    request.max_tokens = 4  # one is committed, and the target's own token is the last
    assert request.has_enough


def test_a_token_that_ends_the_answer_is_judged_without_a_row_and_nobody_waits_for_more() -> None:
    request = running([1, 2, 0, 3], [0.9, 0.9, 0.9, 0.9], least=8)
    request.stop_ids = frozenset({0})
    assert request.pending() == [1, 2]
    assert request.has_enough
    assert request.judge(request.pending(), [1, 2, 0]).num_accepted == 3


@pytest.mark.parametrize(
    ("chosen", "committed", "judged"),
    [
        ([1, 2, 3], (1, 2, 3), (3, 3)),  # the doubtful one proved right
        ([1, 2, 9], (1, 2, 9), (3, 2)),
        ([1, 9, 5], (1, 9), (2, 1)),  # what follows a rejection is not judged
    ],
)
def test_the_proposal_behind_those_verified_is_judged_as_well(
    chosen: list[int], committed: tuple[int, ...], judged: tuple[int, int]
) -> None:
    found = running([1, 2, 3, 4], [0.9, 0.9, 0.1, 0.9])
    before = found.speculation.acceptance
    result = found.judge(found.pending(), chosen)
    assert result.ids == committed
    assert (result.num_judged, result.num_accepted) == judged
    assert (found.speculation.acceptance > before) == (judged[0] == judged[1])
    rest = found.speculation.chain.pending
    assert rest == ([4] if judged[0] == judged[1] else [])


@pytest.mark.parametrize("wanted", [4, 9])
def test_what_comes_after_an_end_is_no_token_of_the_answer(wanted: int) -> None:
    """Otherwise an answer would count more accepted tokens than it has, or a rejection that never happened."""
    found = running([1, 2, 3, 4], [0.9] * 4)
    found.stop_ids = frozenset({2})
    result = found.judge(found.pending(), [1, 2, 3, wanted])
    assert (result.ids, result.num_judged, result.num_accepted) == ((1, 2), 2, 2)


@given(
    confidences=st.lists(st.one_of(st.floats(0.01, 1.0), st.just(1.0)), max_size=12),
    least=st.floats(0.0, 1.0),
    most=st.integers(0, 12),
    settled=st.integers(0, 12),
)
def test_what_is_worth_a_row_is_counted_from_what_is_not_committed_yet(
    confidences: list[float], least: float, most: int, settled: int
) -> None:
    chain = ProposalChain()
    chain.extend(0, 0, [5] * len(confidences), confidences, [])
    chain.settle([5] * settled)
    left = confidences[settled:]
    number = chain.num_worth(least, most)

    def is_worth(rows: list[float]) -> bool:
        return math.prod(rows) >= least and sum(confidence < 1.0 for confidence in rows) <= most

    assert number <= len(left)
    assert is_worth(left[:number]) or number == 0
    assert number == len(left) or not is_worth(left[: number + 1])


def test_what_is_certain_takes_no_place_of_what_may_be_wrong() -> None:
    found = running([1, 2, 3, 4, 5, 6], [1.0, 1.0, 0.9, 1.0, 0.9, 1.0], most=1)
    assert found.pending() == [1, 2, 3, 4]
    before = found.speculation.acceptance
    assert found.judge(found.pending(), [1, 2, 7, 4, 5]).num_accepted == 2
    assert found.speculation.acceptance < before, "only the one that could be wrong counts"


def test_a_row_that_costs_nothing_is_always_worth_it_and_a_dear_one_must_be_likely() -> None:
    speculation = SpeculationState(mode=SpeculationMode.PARALLEL, acceptance=0.9)
    for row_s, least in ((0.0, 0.0), (0.5, 0.2)):
        speculation.drop()
        speculation.replan(StepCosts(base_s=1.0, row_s=row_s, draft_s=0.05), take_turns=False)
        assert speculation.least_likely >= least
    assert speculation.least_likely <= 0.9
