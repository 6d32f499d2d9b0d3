"""A sequence ends exactly at an end-of-sequence id or at its limit, wherever in a commit that is."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.far_ends import prompt_of
from tests.unit.engine.requests import request_of, target_request
from vidspec_models.errors import ContextOverflow
from vidspec_models.grammar import GrammarError, GrammarMask
from vidspec_models.request import SpeculationMode
from vidspec_service.engine.speculation.plan import MAX_DRAFT_TOKENS, Plan
from vidspec_service.engine.target.request import answer_limit
from vidspec_service.engine.types import FinishReason


@given(chunks=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=20), limit=st.integers(1, 20))
def test_committed_tokens_stop_at_the_first_end_or_the_limit(chunks: list[list[int]], limit: int) -> None:
    request = target_request(stop_ids=frozenset({0}), max_tokens=limit)
    for chunk in chunks:
        if request.finish_reason is None:
            request.commit(chunk)
    flat = [token for chunk in chunks for token in chunk]
    end = flat.index(0) + 1 if 0 in flat else len(flat)
    assert request.committed == flat[: min(end, limit)]
    if end <= limit and 0 in flat:
        assert request.finish_reason is FinishReason.STOP
    elif len(flat) >= limit:
        assert request.finish_reason is FinishReason.LENGTH
    else:
        assert request.finish_reason is None


class Broken:
    """A grammar that the last chosen token violates."""

    def check(self) -> None:
        raise GrammarError("the grammar cannot be followed any further")


def test_what_may_not_be_of_the_grammar_is_not_committed() -> None:
    request = target_request(max_tokens=5)
    request.grammar = cast("GrammarMask", Broken())
    with pytest.raises(GrammarError):
        request.commit([1])
    assert request.committed == []


@pytest.mark.parametrize(("asked", "room", "limit"), [(None, 100, 50), (None, 30, 30), (60, 100, 60), (30, 30, 30)])
def test_an_answer_is_as_long_as_was_asked_or_is_usual_and_the_context_has_room_for(
    asked: int | None, room: int, limit: int
) -> None:
    prompt = prompt_of("r")
    request = request_of(max_tokens=asked)
    assert answer_limit(request, prompt, prompt.context_used + room, default=50) == limit
    with pytest.raises(ContextOverflow, match=r"; send fewer frames, less text or a lower max_tokens$"):
        answer_limit(request, prompt, prompt.context_used + (asked or 1) - 1, default=50)
    text = replace(prompt, is_video=torch.zeros_like(prompt.is_video))
    with pytest.raises(ContextOverflow, match=r"\(0 of them video\).*; send less text or a lower max_tokens$"):
        answer_limit(request, text, prompt.context_used + (asked or 1) - 1, default=50)


def test_a_prompt_that_takes_more_of_the_context_than_its_tokens_is_refused_with_both_numbers() -> None:
    prompt = replace(prompt_of("asked 0"), next_position=640)  # as when compression has left tokens out
    with pytest.raises(
        ContextOverflow, match=rf"{prompt.num_tokens} tokens .* positions up to 640 .* needs 17 .* of 650"
    ):
        answer_limit(request_of("asked", max_tokens=17), prompt, 650, default=50)


class Forcing:
    """A grammar that forces forty tokens."""

    def forced(self, prefix: Sequence[int]) -> list[int]:
        return [*range(len(prefix), 40)]

    def check(self) -> None:
        """Allow every token."""


@pytest.mark.parametrize(
    ("mode", "limit", "num_pending"),
    [
        (SpeculationMode.OFF, 100, 0),
        (SpeculationMode.PARALLEL, 100, MAX_DRAFT_TOKENS),
        (SpeculationMode.AUTO, 100, MAX_DRAFT_TOKENS),
        (SpeculationMode.PARALLEL, 11, 9),
        (SpeculationMode.PARALLEL, 2, 0),
    ],
)
def test_without_a_draft_what_the_grammar_forces_is_verified_unless_speculation_is_off(
    mode: SpeculationMode, limit: int, num_pending: int
) -> None:
    request = target_request(grammar=cast("GrammarMask", Forcing()), mode=mode, max_tokens=limit)
    request.commit([0])
    assert request.pending() == [*range(1, 1 + num_pending)]


@pytest.mark.parametrize(
    ("proposed", "limit", "verified", "has_enough"),
    [
        ([(1, 0.9)] * 4, 100, 4, False),
        ([(1, 0.9)] * 5, 100, 5, True),
        ([(1, 0.9)] * 12, 100, 8, True),
        ([(1, 0.9), (1, 0.9), (0, 0.9), (1, 0.9)], 100, 2, True),  # 0 ends the answer: nothing comes after it
        ([(1, 0.9), (1, 0.3), (1, 0.9)], 100, 1, True),  # too unlikely, and so is all that would follow
        ([(1, 0.9)] * 12, 5, 3, True),
        ([(1, 0.9)] * 2, 4, 2, True),  # an answer that has room for no more is not kept waiting for more
    ],
)
def test_proposals_are_verified_and_awaited_as_far_as_they_are_of_use(
    proposed: list[tuple[int, float]], limit: int, verified: int, has_enough: bool
) -> None:
    request = target_request(mode=SpeculationMode.PARALLEL, max_tokens=limit, stop_ids=frozenset({0}), committed=[1])
    request.speculation.plan = Plan(min_draft_tokens=5, max_draft_tokens=8, max_lead=16, speedup=2.0)
    request.speculation.least_likely, request.speculation.is_followed = 0.3, True
    ids, confidences = zip(*proposed, strict=True)
    request.speculation.chain.extend(1, 1, ids, confidences, request.committed)
    assert (request.pending(), request.has_enough) == ([*ids[:verified]], has_enough)
    request.speculation.is_followed = False
    assert request.has_enough
