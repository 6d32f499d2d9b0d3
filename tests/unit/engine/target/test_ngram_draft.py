"""A draft without a model proposes what was said before, and to each caller what was said to it."""

from __future__ import annotations

import torch

from tests.unit.engine.counting_model import CountingModel
from tests.unit.engine.requests import target_request
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.inputs import Prompt
from vidspec_service.engine.target.ngram_draft import NgramDraft
from vidspec_service.engine.target.request import TargetRequest

SAID = [5, 6, 7, 8, 9, 0]
PROMPT = Prompt(
    ids=(1, 2, 2, 2),
    embeddings=torch.zeros(4, 4),
    rotary=(torch.zeros(4, 1, 1),) * 2,
    is_video=torch.tensor([False, True, True, True]),
    next_position=4,
)


def request_of(caller: str, name: str) -> TargetRequest:
    cache = KVCache(CountingModel.decoder.geometry, 64)
    cache.length = 40
    return target_request(PROMPT, cache, stop_ids=frozenset({0}), max_tokens=20, caller=caller, name=name)


def begun(draft: NgramDraft, caller: str, name: str = "next") -> TargetRequest:
    """A request that begins as the earlier one did."""
    request = request_of(caller, name)
    request.commit(SAID[:2])
    draft.propose(request)
    return request


def with_one_answer() -> NgramDraft:
    draft = NgramDraft()
    first = request_of("ann", "first")
    first.commit(SAID)
    draft.end(first)
    return draft


def test_an_earlier_answer_is_proposed_to_its_caller_alone() -> None:
    draft = with_one_answer()
    assert begun(draft, "ann").speculation.chain.pending(2) == SAID[2:]
    assert begun(draft, "bob", "another").speculation.chain.pending(2) == []


def test_a_proposal_that_failed_gives_way_to_another() -> None:
    draft = with_one_answer()
    request = begun(draft, "ann")
    assert request.judge([], [3]).num_rollbacks == 1  # not 7, though nothing was verified
    request.commit([5, 6])
    draft.propose(request)
    assert request.speculation.chain.pending(5) == [3, 5, 6], "the answer itself is newer"


def test_what_still_holds_is_left_as_it_is() -> None:
    draft = with_one_answer()
    request = begun(draft, "ann")
    request.judge([7], [7, 8])
    draft.propose(request)
    assert request.speculation.chain.pending(4) == [9, 0]
    assert request.speculation.chain.num_wasted == 0


def test_a_guess_is_never_certain_however_well_the_last_ones_went() -> None:
    draft = with_one_answer()
    request = request_of("ann", "next")
    request.speculation.acceptance = 1.0
    request.commit(SAID[:2])
    draft.propose(request)
    assert request.speculation.chain.num_uncertain(3) == 3
