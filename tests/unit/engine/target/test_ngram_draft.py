"""A draft without a model proposes earlier text, to each caller only from that caller's answers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.counting_model import CountingModel
from tests.unit.engine.requests import target_request
from tests.unit.engine.target.test_request import Forcing
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.grammar import GrammarMask
from vidspec_models.prompt import Prompt
from vidspec_service.engine.target.ngram_draft import NgramDraft, NgramIndex
from vidspec_service.engine.target.request import TargetRequest

TEXT = st.lists(st.integers(0, 3), max_size=20)
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
    return target_request(PROMPT, cache, stop_ids=frozenset({0}), max_tokens=2000, caller=caller, name=name)


def begun(draft: NgramDraft, caller: str, name: str = "next") -> TargetRequest:
    """A request whose answer begins like the earlier one."""
    request = request_of(caller, name)
    request.commit(SAID[:2])
    draft.propose(request)
    return request


def with_answers(*answers: list[int]) -> NgramDraft:
    """A draft that knows these complete answers of one caller."""
    draft = NgramDraft()
    for said in answers:
        ended = request_of("ann", "ended")
        ended.commit(said)
        draft.end(ended)
    return draft


def test_an_earlier_answer_is_proposed_to_its_caller_alone() -> None:
    draft = with_answers(SAID)
    assert begun(draft, "ann").speculation.chain.pending == SAID[2:]
    assert begun(draft, "bob", "another").speculation.chain.pending == []
    salted = request_of("ann", "salted")
    salted.asked = replace(salted.asked, cache_salt="a user of hers")
    salted.commit(SAID[:2])
    draft.propose(salted)
    assert salted.speculation.chain.pending == []


def test_a_proposal_that_failed_gives_way_to_another() -> None:
    draft = with_answers(SAID)
    request = begun(draft, "ann")
    assert request.judge([], [3]).num_rollbacks == 1  # not 7, though nothing was verified
    request.commit([5, 6])
    draft.propose(request)
    assert request.speculation.chain.pending == [3, 5, 6], "the answer itself is newer"


def test_what_still_holds_is_left_as_it_is() -> None:
    draft = with_answers(SAID)
    request = begun(draft, "ann")
    request.judge([7], [7, 8])
    draft.propose(request)
    assert request.speculation.chain.pending == [9, 0]
    assert request.speculation.chain.num_wasted == 0


def test_a_guess_is_never_certain_however_well_the_last_ones_went() -> None:
    draft = with_answers(SAID)
    request = request_of("ann", "next")
    request.speculation.acceptance = 1.0
    request.commit(SAID[:2])
    draft.propose(request)
    assert request.speculation.chain.num_uncertain(3) == 3


def test_what_the_grammar_forces_is_certain_and_goes_before_any_guess() -> None:
    draft = with_answers(SAID)
    request = request_of("ann", "next")
    request.grammar = cast("GrammarMask", Forcing())
    request.commit(SAID[:2])
    draft.propose(request)
    assert request.speculation.chain.pending[:3] == [2, 3, 4]
    assert request.speculation.chain.num_uncertain(3) == 0


@pytest.mark.parametrize(
    ("answers", "is_proposed"),
    [
        ([SAID, *[[3, 0]] * 7], True),
        ([SAID, *[[3, 0]] * 8], False),
        ([[9] * 1018 + SAID], True),
        ([[9] * 1022 + SAID], False),
    ],
)
def test_eight_answers_are_remembered_and_of_each_no_more_than_its_beginning(
    answers: list[list[int]], is_proposed: bool
) -> None:
    assert begun(with_answers(*answers), "ann").speculation.chain.pending == (SAID[2:] if is_proposed else [])


def test_nothing_is_kept_of_a_request_that_was_given_up() -> None:
    draft, request = NgramDraft(), request_of("ann", "given up")
    draft.propose(request)
    index = weakref.ref(draft._index(request))
    assert index() is not None
    del request
    assert index() is None


def searched(texts: Sequence[Sequence[int]], answer: Sequence[int], most: int) -> list[int]:
    """The reference: a brute-force search."""
    for length in (4, 3, 2):
        suffix = list(answer[-length:])
        if len(suffix) < length:
            continue
        for text in (answer, *reversed(texts)):
            for end in range(len(text) - 1, length - 1, -1):
                if list(text[end - length : end]) == suffix:
                    return list(text[end : end + most])
    return []


@given(texts=st.lists(TEXT, max_size=3), answer=TEXT, cuts=st.lists(st.integers(0, 20)), most=st.integers(1, 8))
def test_the_last_place_of_the_longest_known_ngram_is_continued(
    texts: list[list[int]], answer: list[int], cuts: list[int], most: int
) -> None:
    index = NgramIndex(texts)
    for cut in sorted(cuts):  # earlier queries must not matter
        index.continuation(answer[:cut], most)
    assert index.continuation(answer, most) == searched(texts, answer, most)
