"""Events of an answer come in order, and count what belongs to the answer."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.fakes import PROMPT_READY
from tests.unit.engine.requests import request_of
from vidspec_models.request import END_THINK, THINK, Include, Preservation, Reasoning
from vidspec_service.engine.frontend.output_processor import OutputProcessor
from vidspec_service.engine.ipc.messages import Ended, Tokens
from vidspec_service.engine.types import DraftView, Finished, FinishReason, TextDelta
from vidspec_service.telemetry import EngineMetrics


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token: the hardest case for characters of several bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()
METRICS = EngineMetrics(CollectorRegistry())


def test_what_is_told_before_the_prompt_is_ready_comes_right_after_that() -> None:
    answer = OutputProcessor(TOKENIZER, request_of(), METRICS)
    view = DraftView(request_id="r", preservation=Preservation.HIPPO, prune_ratio=0.9, videos=())
    assert answer.process([view]) == []
    assert answer.process([PROMPT_READY]) == [PROMPT_READY, view]
    assert answer.process([view]) == [view]


def test_the_draft_saw_what_it_saw_last() -> None:
    answer = OutputProcessor(TOKENIZER, request_of(), METRICS)
    answer.process([PROMPT_READY])
    for seen in (60, 40):
        answer.process([Tokens(request_id="r", ids=(64,), num_judged=1, draft_video_tokens=seen)])
    (finished,) = answer.process([Ended(request_id="r", finish_reason=FinishReason.STOP)])
    assert isinstance(finished, Finished)
    assert finished.speculation.draft_video_tokens == 40


def test_draft_tokens_after_a_stop_string_count_neither_for_the_answer_nor_in_the_metrics() -> None:
    registry = CollectorRegistry()
    answer = OutputProcessor(TOKENIZER, replace(request_of(), stop=("b",)), EngineMetrics(registry))
    answer.process([PROMPT_READY])
    ids = tuple(TOKENIZER.encode("aabaa").ids)
    forward = Tokens(request_id="r", ids=ids, num_judged=5, num_accepted=4, num_rollbacks=2, num_wasted=7)
    *_, finished = answer.process([forward])
    assert isinstance(finished, Finished)
    told = finished.speculation
    assert (finished.completion_tokens, told.num_draft_tokens, told.num_accepted_tokens) == (3, 3, 3)
    counted = {
        "num_drafts": 1,
        "num_draft_tokens": 3,
        "num_accepted_tokens": 3,
        "rollbacks": 2,
        "wasted_draft_tokens": 7,
    }
    for name, value in counted.items():
        assert registry.get_sample_value(f"vidspec:spec_decode_{name}_total") == value
    per_place = "vidspec:spec_decode_num_accepted_tokens_per_pos_total"
    assert [registry.get_sample_value(per_place, {"position": place}) for place in "0123"] == [1, 1, 1, None]


def test_what_is_told_of_an_answer_that_is_taken_up_goes_on_in_the_middle_of_a_character() -> None:
    first, second = TOKENIZER.encode("é").ids
    asked = replace(request_of(committed=(first,)), include=frozenset({Include.TOKEN_DETAILS}))
    answer = OutputProcessor(TOKENIZER, asked, METRICS)
    answer.process([PROMPT_READY])
    (delta,) = answer.process([Tokens(request_id="r", ids=(second,))])
    assert isinstance(delta, TextDelta)
    assert [each.text for each in delta.details] == ["é"]


@pytest.mark.parametrize(
    ("stop", "rest", "reason"), [(("\ufffd",), [], FinishReason.STOP), ((), ["\ufffd"], FinishReason.LENGTH)]
)
def test_what_was_held_back_comes_with_the_end_unless_it_completes_a_stop_string(
    stop: tuple[str, ...], rest: list[str], reason: FinishReason
) -> None:
    answer = OutputProcessor(TOKENIZER, replace(request_of(), stop=stop), METRICS)
    answer.process([PROMPT_READY])
    answer.process([Tokens(request_id="r", ids=tuple(TOKENIZER.encode("é").ids[:1]))])  # the rest may still come
    *deltas, finished = answer.process([Ended(request_id="r", finish_reason=FinishReason.LENGTH)])
    assert [delta.text for delta in deltas if isinstance(delta, TextDelta)] == rest
    assert isinstance(finished, Finished)
    assert finished.finish_reason is reason


@pytest.mark.parametrize(
    ("reasoning", "committed", "text", "counted"),
    [
        (Reasoning.OPEN, "", "ab/cd", 3),
        (Reasoning.OPEN, "", "abcd", 4),
        (Reasoning.OPEN, "ab/c", "d", 3),
        (Reasoning.TAGGED, "", "=ab/cd", 4),
        (Reasoning.TAGGED, "", "\n\n =ab/cd", 7),
        (Reasoning.TAGGED, "", "a=b/cd", 0),
        (Reasoning.TAGGED, "", "ab/cd", 0),
        (Reasoning.NONE, "", "=ab/cd", 0),
    ],
)
def test_tokens_up_to_the_end_of_reasoning_are_counted_for_the_whole_answer(
    reasoning: Reasoning, committed: str, text: str, counted: int
) -> None:
    """In this tokenizer "=" begins reasoning, and "/" ends it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([THINK, END_THINK])
    tags = {"=": tokenizer.token_to_id(THINK), "/": tokenizer.token_to_id(END_THINK)}
    before, ids = (
        tuple(tags.get(char) or tokenizer.encode(char).ids[0] for char in said) for said in (committed, text)
    )
    answer = OutputProcessor(tokenizer, request_of(committed=before), METRICS)
    answer.process([replace(PROMPT_READY, reasoning=reasoning)])
    answer.process([Tokens(request_id="r", ids=ids)])
    (finished,) = answer.process([Ended(request_id="r", finish_reason=FinishReason.STOP)])
    assert isinstance(finished, Finished)
    assert (finished.reasoning_tokens, finished.completion_tokens) == (counted, len(text))
