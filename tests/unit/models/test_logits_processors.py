"""Processed logits equal transformers', row by row, whatever else is in the batch and whatever came before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from vidspec_models.grammar import GrammarMask
from vidspec_models.logits_processors import Penalties, make_logits_processors
from vidspec_models.request import GenerationRequest, SamplingParams
from vidspec_models.sampling import CoupledSampler, LogitsProcessor

VOCABULARY = 40
PROMPT, PREFIX, PENDING = [3, 3, 17, 39, 200], [5, 17, 5, 8], [8, 5, 31, 5]
ENDS = frozenset({7, 11})


def logits(num_rows: int, seed: int = 0) -> Tensor:
    return 4 * torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def processors(min_tokens: int = 0, ends: frozenset[int] = ENDS, **law: Any) -> list[LogitsProcessor]:
    params = SamplingParams(**law)
    request = GenerationRequest(request_id="r", turns=(), sampling=params, min_tokens=min_tokens)
    return make_logits_processors(request, PROMPT, ends)


def changed(
    by: Sequence[LogitsProcessor], rows: Tensor, prefix: Sequence[int] = PREFIX, pending: Sequence[int] = PENDING
) -> Tensor:
    rows = rows.clone()
    for process in by:
        rows = process(rows, prefix, pending)
    return rows


def answers() -> list[list[int]]:
    """The tokens before each row i."""
    return [PREFIX + PENDING[:i] for i in range(len(PENDING) + 1)]


def test_a_plain_request_has_no_processors() -> None:
    assert processors() == []


def test_repetition_penalty_is_transformers_over_prompt_and_answer() -> None:
    rows = logits(5)
    ours = changed(processors(repetition_penalty=1.3), rows)
    known = [token for token in PROMPT if token < VOCABULARY]
    for i, answer in enumerate(answers()):
        theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([known + answer]), rows[i : i + 1])
        assert torch.equal(ours[i : i + 1], theirs)


def test_where_nothing_has_been_nothing_is_penalised() -> None:
    law = SamplingParams(repetition_penalty=1.3, frequency_penalty=1.0)
    rows = logits(1)
    request = GenerationRequest(request_id="r", turns=(), sampling=law)
    assert torch.equal(changed(make_logits_processors(request, [], ENDS), rows, [], []), rows)


def test_a_step_does_not_look_through_the_prompt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt with a hundred thousand different tokens that took 0.2 s."""
    penalties = Penalties(SamplingParams(repetition_penalty=1.3), range(VOCABULARY))
    first = penalties(torch.ones(1, VOCABULARY), [5], [])
    monkeypatch.setattr(penalties, "_in_prompt", frozenset({5}))
    assert torch.equal(penalties(torch.ones(1, VOCABULARY), [5], []), first)


def test_presence_and_frequency_count_the_answer_alone_as_openai_defines_them() -> None:
    rows = logits(5)
    ours = changed(processors(presence_penalty=0.7, frequency_penalty=-0.4), rows)
    for i, answer in enumerate(answers()):
        for token in range(VOCABULARY):
            count = answer.count(token)
            assert ours[i, token].item() == pytest.approx(rows[i, token].item() + 0.4 * count - 0.7 * (count > 0))


def test_logit_bias_is_transformers() -> None:
    bias = {2: 5.0, 30: -100.0}
    rows = logits(5)
    theirs = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    ours = changed(processors(logit_bias=tuple(bias.items())), rows)
    assert torch.equal(ours, theirs(torch.tensor([PREFIX] * 5), rows))


def test_bad_words_are_transformers_in_the_answer() -> None:
    words = [[4], [5, 8], [17, 5, 9], [8, 5, 31, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [5, 31]]
    rows = logits(5)
    ours = changed(processors(bad_word_ids=tuple(map(tuple, words))), rows)
    excluded = []
    for i, answer in enumerate(answers()):
        theirs = NoBadWordsLogitsProcessor(words)(torch.tensor([answer]), rows[i : i + 1])
        assert torch.equal(ours[i] < -1e29, theirs[0] < -1e29)
        assert torch.equal(ours[i][ours[i] > -1e29], theirs[0][theirs[0] > -1e29])
        excluded.append(int((ours[i] < -1e29).sum()))
    assert len(set(excluded)) > 1


@pytest.mark.parametrize("least", [1, 4, 5, 6, 7, 20])
def test_min_tokens_are_transformers(least: int) -> None:
    rows = logits(5)
    ours = changed(processors(min_tokens=least), rows)
    for i, answer in enumerate(answers()):
        ends = sorted(ENDS)
        theirs = MinNewTokensLengthLogitsProcessor(0, least, ends, device="cpu")(
            torch.tensor([answer]), rows[i : i + 1]
        )
        assert torch.equal(ours[i] < -1e29, theirs[0] < -1e29)


def test_what_no_logit_has_means_nothing() -> None:
    rows = logits(5)
    law: dict[str, Any] = {"logit_bias": ((4000, 5.0), (-1, 3.0)), "bad_word_ids": ((4000,), (5, 4000))}
    assert torch.equal(changed(processors(ends=frozenset({4000}), min_tokens=9, **law), rows), rows)


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    visits=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6),
    penalties=st.tuples(st.sampled_from([1.0, 0.5, 1.7]), st.sampled_from([0.0, -1.5, 2.0]), st.sampled_from([0.0, 1])),
    words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=5),
    least=st.integers(0, 15),
)
def test_a_row_is_the_row_computed_alone_after_any_history(
    visits: list[tuple[list[int], list[int]]],
    penalties: tuple[float, float, float],
    words: list[list[int]],
    least: int,
) -> None:
    """A draft's prefix grows, shrinks and changes; a target's rows are verified together."""
    repetition, frequency, presence = penalties
    law: dict[str, Any] = {
        "repetition_penalty": repetition,
        "frequency_penalty": frequency,
        "presence_penalty": presence,
        "bad_word_ids": tuple(map(tuple, words)),
        "logit_bias": ((1, 2.5),),
    }
    used = processors(min_tokens=least, **law)
    for seed, (prefix, pending) in enumerate(visits):
        rows = logits(len(pending) + 1, seed)
        together = changed(used, rows, prefix, pending)
        for i in range(len(rows)):
            alone = changed(processors(min_tokens=least, **law), rows[i : i + 1], prefix + pending[:i], ())
            assert torch.equal(together[i : i + 1], alone)


def test_a_sampler_runs_its_processors_on_a_copy_in_their_order() -> None:
    rows = logits(5).bfloat16()
    before = rows.clone()
    law = SamplingParams(logit_bias=((9, 100.0),), bad_word_ids=((9,),))
    request = GenerationRequest(request_id="r", turns=(), sampling=law)
    sampler = CoupledSampler(law, make_logits_processors(request, PROMPT, ENDS))
    assert 9 not in sampler.sample(rows, PREFIX, PENDING)
    assert torch.equal(rows, before)
    assert not sampler.can_run_ahead


class Only:
    """A constraint that allows one token."""

    def __call__(self, logits: Tensor, prefix: Sequence[int], pending: Sequence[int]) -> Tensor:
        return logits.index_fill(-1, torch.tensor([at for at in range(VOCABULARY) if at != 9]), -math.inf)

    def num_allowed(self, chosen: Sequence[int], prefix: Sequence[int], pending: Sequence[int]) -> int:
        return 0


@pytest.mark.parametrize("law", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}])
def test_where_a_grammar_leaves_only_what_is_excluded_that_is_chosen(law: dict[str, Any]) -> None:
    excluding = processors(bad_word_ids=((9,),), min_tokens=20, ends=frozenset({9}))
    sampler = CoupledSampler(SamplingParams(**law), excluding, constraint=cast(GrammarMask, Only()))
    assert sampler.sample(logits(5), PREFIX, PENDING) == [9] * 5


def test_min_p_leaves_what_transformers_leaves() -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

    from vidspec_models.gumbel import filtered_log_probabilities

    rows = logits(50)
    ours = filtered_log_probabilities(rows, SamplingParams(temperature=0.7, top_p=0.95, min_p=0.1))
    theirs = MinPLogitsWarper(0.1)(None, TopPLogitsWarper(0.95)(None, TemperatureLogitsWarper(0.7)(None, rows)))
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert 1 < ours.isfinite().sum() / 50 < VOCABULARY / 2
    most = filtered_log_probabilities(rows, SamplingParams(temperature=0.7, min_p=1.0))
    assert most.isfinite().sum(-1).tolist() == [1] * 50
    assert not CoupledSampler(SamplingParams(temperature=0.7, min_p=0.1)).can_run_ahead
    assert math.isfinite(ours.amax())
