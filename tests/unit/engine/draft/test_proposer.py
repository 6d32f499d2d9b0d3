"""How many tokens a draft generates before it checks for messages from the target."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tests.unit.engine.draft.test_request import drafting_of, prompt
from vidspec_models.grammar import GrammarMask
from vidspec_models.prompt import Prompt
from vidspec_models.sampling import CoupledSampler, DraftToken
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.draft.loop import Proposer
from vidspec_service.engine.draft.request import MIN_CALL_TOKENS
from vidspec_service.engine.ipc.messages import Verdict

__all__ = ["prompt"]  # a fixture


class Model:
    """Generates as many tokens as it is asked for, each in the same time; `now` is its clock."""

    def __init__(self, token_s: float) -> None:
        self.token_s = token_s
        self.now = 0.0

    def propose(
        self, batch: Sequence[tuple[StepRows, CoupledSampler, Sequence[int]]], most: int
    ) -> list[list[DraftToken]]:
        ((rows, _, _),) = batch
        rows.cache.length += len(rows.ids) + most - 1
        self.now += most * self.token_s
        return [[DraftToken(token, 0.5) for token in range(most)]]


@pytest.mark.parametrize(
    ("token_s", "min_draft_tokens", "at_once"),
    [
        pytest.param(0.0001, 0, MIN_CALL_TOKENS, id="fast"),
        pytest.param(0.0008, 0, 2, id="a wrong token would be followed by others"),
        pytest.param(0.03, 0, 1, id="slow"),
        pytest.param(0.03, MIN_CALL_TOKENS + 3, 3, id="no verdict comes before the target has these"),
    ],
)
def test_a_slow_draft_looks_up_sooner(
    prompt: Prompt, monkeypatch: pytest.MonkeyPatch, token_s: float, min_draft_tokens: int, at_once: int
) -> None:
    """The draft knows its speed after the first tokens."""
    model, request = Model(token_s), drafting_of(prompt)
    monkeypatch.setattr(time, "monotonic", lambda: model.now)
    request.cache.length = request.prompt.num_tokens
    request.handle(Verdict(request_id="r", start=0, ids=(5,), max_lead=16, min_draft_tokens=min_draft_tokens))
    proposer = Proposer(cast(VideoLM, model))
    first, second = (len(proposer.propose([(request, [])])[0].ids) for _ in itertools.repeat(None, 2))
    assert (first, second) == (MIN_CALL_TOKENS, at_once)


def test_the_more_the_target_has_to_verify_the_more_tokens_a_call_makes(prompt: Prompt) -> None:
    model, request = Model(0.0), drafting_of(prompt)
    request.cache.length = request.prompt.num_tokens
    request.handle(Verdict(request_id="r", start=0, ids=(5,), max_lead=40))
    proposer = Proposer(cast(VideoLM, model))
    proposals = [proposer.propose([(request, [])])[0] for _ in range(4)]
    assert [len(proposal.ids) for proposal in proposals] == [8, 8, 16, 8], "the last one ends at the lead"


def test_a_device_that_makes_fewer_tokens_in_a_call_is_asked_for_as_many_again(prompt: Prompt) -> None:
    class Few(Model):
        def propose(self, batch: Any, most: int) -> list[list[DraftToken]]:
            asked.append(most)
            return super().propose(batch, min(most, 4))

    asked, request = list[int](), drafting_of(prompt)
    request.cache.length = request.prompt.num_tokens
    request.handle(Verdict(request_id="r", start=0, ids=(5,), max_lead=40))
    proposer = Proposer(cast(VideoLM, Few(0.0)))
    for _ in range(3):
        proposer.propose([(request, [])])
    assert asked == [8, 8, 8]


def test_where_a_grammar_has_just_decided_a_call_makes_one_token(prompt: Prompt) -> None:
    """It may decide about the next one, too."""

    class Excluded(Model):
        def propose(self, batch: Any, most: int) -> list[list[DraftToken]]:
            asked.append(most)
            return super().propose(batch, min(most, 5))  # the grammar does not allow what would come then

    asked, request = list[int](), drafting_of(prompt)
    request.grammar = cast(GrammarMask, object())
    request.cache.length = request.prompt.num_tokens
    request.handle(Verdict(request_id="r", start=0, ids=(5,), max_lead=40))
    proposer = Proposer(cast(VideoLM, Excluded(0.0)))
    for forced in ([7], [], []):
        proposer.propose([(request, forced)])
    assert asked == [1, 8, 1]


def test_a_draft_stops_where_its_answer_ends_until_the_target_goes_on(prompt: Prompt) -> None:
    request = drafting_of(prompt)
    request.stop_ids = frozenset({4})
    request.cache.length = request.prompt.num_tokens
    request.handle(Verdict(request_id="r", start=0, ids=(9,), max_lead=40))
    proposer = Proposer(cast(VideoLM, Model(0.0)))
    assert proposer.propose([(request, [])])[0].ids == (0, 1, 2, 3, 4)
    assert not request.can_run
    assert request.cache.length <= request.prompt.num_tokens + len(request.sequence.tokens)
    request.handle(Verdict(request_id="r", start=1, ids=(0, 1, 2, 3, 8), max_lead=40))
    assert request.missing == [8]
    assert request.can_run
