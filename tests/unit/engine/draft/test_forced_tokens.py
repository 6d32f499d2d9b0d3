"""Tokens that a grammar forces are proposed without a forward pass of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from tests.unit.engine.draft.test_request import drafting_of, prompt
from vidspec_models.grammar import GrammarMask
from vidspec_models.prompt import Prompt
from vidspec_models.sampling import CoupledSampler, DraftToken
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.draft.loop import Proposer
from vidspec_service.engine.draft.request import DraftRequest
from vidspec_service.engine.ipc.messages import Proposal, Verdict
from vidspec_service.engine.speculation.plan import MAX_AHEAD

__all__ = ["prompt"]  # a fixture


class Model:
    """Always predicts 5, and records the tokens it was given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def propose(
        self, batch: Sequence[tuple[StepRows, CoupledSampler, Sequence[int]]], most: int
    ) -> list[list[DraftToken]]:
        for rows, _, _ in batch:
            self.given.append(list(rows.ids))
            rows.cache.length += len(rows.ids)
        return [[DraftToken(5, 0.5)] for _ in batch]


class Grammar:
    """Forces 7, 8 and 9 after 5."""

    def forced(self, prefix: Sequence[int]) -> list[int]:
        return [7, 8, 9] if prefix[-1] == 5 else []


class Constant:
    """Forces one long answer."""

    def forced(self, prefix: Sequence[int]) -> list[int]:
        return [7] * 1000


def decoding(prompt: Prompt, max_lead: int) -> DraftRequest:
    request = drafting_of(prompt)
    request.grammar = cast(GrammarMask, Grammar())
    request.cache.length = request.prompt.num_tokens
    request.handle(Verdict(request_id="r", start=0, ids=(5,), max_lead=max_lead))
    return request


def propose(proposer: Proposer, *batch: DraftRequest) -> list[Proposal]:
    return proposer.propose([(request, request.forced()) for request in batch])


def test_forced_tokens_are_sure_and_are_told_with_what_is_guessed_after_them(prompt: Prompt) -> None:
    model, request = Model(), decoding(prompt, max_lead=20)
    proposer = Proposer(cast(VideoLM, model))
    said = [propose(proposer, request)[0] for _ in range(3)]
    assert [each.start for each in said] == [1, 5, 9]
    assert [each.ids for each in said] == [(7, 8, 9, 5)] * 3
    assert [each.confidences for each in said] == [(1.0, 1.0, 1.0, 0.5)] * 3
    assert model.given == [[5, 7, 8, 9]] * 3
    assert request.missing == [5]


def test_proposals_are_timed_by_their_forwards_for_the_target_plans_by_it(prompt: Prompt) -> None:
    proposer, request = Proposer(cast(VideoLM, Model())), decoding(prompt, max_lead=20)
    assert propose(proposer, request)[0].step_s > 0
    endless = decoding(prompt, max_lead=20)
    endless.grammar, endless.max_tokens = cast(GrammarMask, Constant()), 1000
    (said,) = propose(Proposer(cast(VideoLM, Model())), endless)
    assert (set(said.ids), said.step_s) == ({7}, 0.0)


def test_forced_tokens_take_nothing_of_the_lead(prompt: Prompt) -> None:
    """Forced tokens cannot be rejected, so the draft need not wait for their verdict."""
    model, request = Model(), decoding(prompt, max_lead=2)
    proposer = Proposer(cast(VideoLM, model))
    assert [propose(proposer, request)[0].ids for _ in range(2)] == [(7, 8, 9, 5)] * 2
    assert not request.can_run
    request.handle(Verdict(request_id="r", start=1, ids=(7, 8, 9, 5, 7), max_lead=2))
    assert request.can_run
    request.handle(Verdict(request_id="r", start=6, ids=(1,), max_lead=1))
    assert (request.sequence.tokens, request.num_left) == ([5, 7, 8, 9, 5, 7, 1], 1)


def test_forced_tokens_do_not_run_ahead_for_ever(prompt: Prompt) -> None:
    request = decoding(prompt, max_lead=2)
    request.grammar, request.max_tokens = cast(GrammarMask, Constant()), 1000
    proposer = Proposer(cast(VideoLM, Model()))
    while request.can_run:
        propose(proposer, request)
    assert request.sequence.num_ahead == MAX_AHEAD


def test_who_has_no_grammar_takes_its_forward_beside_who_has(prompt: Prompt) -> None:
    model, held, plain = Model(), decoding(prompt, max_lead=20), decoding(prompt, max_lead=20)
    plain.grammar, plain.asked = None, replace(plain.asked, request_id="plain")
    said = propose(Proposer(cast(VideoLM, model)), held, plain)
    assert [each.ids for each in said] == [(7, 8, 9, 5), (5,)]
    assert model.given == [[5, 7, 8, 9], [5]]
