"""What every API says of an answer's tokens is the same, whole and streamed, however many of them come at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer

from tests.fakes import PROMPT_READY
from tests.unit.engine.frontend.test_output_processor import byte_tokenizer
from tests.unit.engine.requests import request_of
from vidspec_models.request import END_THINK, THINK, Include, Reasoning
from vidspec_service.api.schemas.answer_parser import CLOSES, OPENS, CallFormat, message_from
from vidspec_service.api.schemas.chat_completions import ChatCompletionChunk, ChatCompletionResponse
from vidspec_service.api.schemas.completions import CompletionChunk, CompletionResponse
from vidspec_service.api.schemas.dialects import ChatDialect, Dialect, Facts, FullChoice
from vidspec_service.api.schemas.extras import logprobs_fields
from vidspec_service.api.schemas.responses_output import ResponseDialect
from vidspec_service.api.schemas.video_chat import VIDEO_CHAT_DIALECT
from vidspec_service.engine.frontend.output_processor import OutputProcessor
from vidspec_service.engine.ipc.messages import Ended, Tokens
from vidspec_service.engine.types import Finished, FinishReason, GenerationEvent, TextDelta
from vidspec_service.telemetry import EngineMetrics

HIDDEN, END = "<|box_start|>", "<|im_end|>"


def tagging_tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([THINK, END_THINK, OPENS, CLOSES])
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in (HIDDEN, END)])
    return tokenizer


TOKENIZER = tagging_tokenizer()
CALLS = CallFormat(
    heads={f'{OPENS}\n{{"name": "{name}", "arguments": ': name for name in ("go", "stay")},
    tail=f"}}\n{CLOSES}",
    opens=OPENS,
)
CALL = f'{OPENS}\n{{"name": "go", "arguments": {{"at": "}}狐"}}}}\n{CLOSES}'
HEAD = {"id": "x", "created": 1, "model": "m"}
ASKED = {"text": {"format": {"type": "text"}}}
FACTS: Facts = {
    "usage": {
        "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2,
        "prompt_tokens_details": {"video_tokens": 0, "cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
        },
    },
    "video": None,
    "videos": [],
    "speculation": {"mode": "off", "acceptance_rate": 0, "mean_accepted_tokens": 0, "draft_video_tokens": 0},
    "timings": dict.fromkeys(
        ("queue_s", "decode_s", "prefill_s", "time_to_first_token_s", "time_per_output_token_s"), 0
    ),
}  # fmt: skip
DIALECTS: dict[str, Dialect] = {
    "video-chat": VIDEO_CHAT_DIALECT,
    "chat": ChatDialect(ChatCompletionResponse, ChatCompletionChunk, None, id_prefix="", calls=CALLS),
    "completions": ChatDialect(CompletionResponse, CompletionChunk, None, id_prefix="", names_role=False),
    "responses": ResponseDialect(asked=ASKED, calls=CALLS),
}
TEXTS = (
    f"It\n{END_THINK}Réd {HIDDEN}狐.\n{END}",
    f"{HIDDEN}It{END_THINK}Réd 狐.{END}",
    f"{THINK}It\n\nis{END_THINK}\n\nI go.\n{CALL}\n{CALL}{END}",
    f"{HIDDEN}{HIDDEN}It{END_THINK}{HIDDEN}{CALL}{END}",
    "It is </think",
)
STOPS = ("\nUser", "\n\nUser", "k>!", "狐!", "}\n!", "go", "狐.", "is", '"}')


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def pieces_of(ids: Sequence[int], sizes: Sequence[int], stop: Sequence[str], reasoning: Reasoning) -> list[Any]:
    """The events of one answer, of which so many tokens come at a time."""
    asked = replace(request_of(), stop=tuple(stop), logprobs=1, include=frozenset({Include.TOKEN_DETAILS}))
    output = OutputProcessor(TOKENIZER, asked, EngineMetrics(CollectorRegistry()))
    told: list[GenerationEvent] = output.process([replace(PROMPT_READY, reasoning=reasoning)])
    at = 0
    for size in (*sizes, len(ids)):
        if at < len(ids) and not isinstance(told[-1], Finished):
            rows = tuple((-float(place), ()) for place in range(at, min(at + size, len(ids))))
            told += output.process([Tokens(request_id="r", ids=tuple(ids[at : at + size]), logprobs=rows)])
            at += size
    if not isinstance(told[-1], Finished):
        told += output.process([Ended(request_id="r", finish_reason=FinishReason.STOP)])
    return [event for event in told if isinstance(event, TextDelta | Finished)]


def token_info(pieces: Sequence[TextDelta]) -> dict[str, Any]:
    return {
        "logprobs": logprobs_fields(each for piece in pieces for each in piece.logprobs),
        "token_details": [each for piece in pieces for each in piece.details],
    }


def whole(dialect: Dialect, pieces: Sequence[Any], reasoning: Reasoning) -> Any:
    *texts, finished = pieces
    choice = FullChoice(texts, token_info, finished.finish_reason.value, reasoning)
    answer = json.loads(dialect.full_body(HEAD, [choice], FACTS))
    if "output" in answer:
        return answer["output"]
    (found,) = answer["choices"]
    found.get("message", {}).pop("refusal", None)  # always null, and never streamed
    return found


def streamed(dialect: Dialect, pieces: Sequence[Any], reasoning: Reasoning) -> Any:
    *texts, finished = pieces
    writer = dialect.events(HEAD, dict, reasoning)
    told = [*writer.on_start()]
    for piece in texts:
        told += writer.on_text(0, piece.text, token_info([piece]))
    told += [*writer.on_choice_end(0, finished.finish_reason.value), *writer.on_end(FACTS)]
    events = [json.loads(text.split("data: ")[1]) for text in told if "[DONE]" not in text]
    return events[-1]["response"]["output"] if "response" in events[-1] else joined(events)


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The choice of a whole answer, of a stream's chunks."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    found: dict[str, Any] = {"index": 0, "finish_reason": choices[-1]["finish_reason"]}
    if "text" in choices[0]:
        found["text"] = "".join(choice["text"] for choice in choices)
    else:
        found["message"] = {"role": "assistant", **message_from(choice["delta"] for choice in choices)}
        if said_twice := "".join(choice["delta"].get("reasoning_content", "") for choice in choices):
            found["message"]["reasoning_content"] = said_twice
    logprobs: dict[str, Any] = {}
    for choice in choices:
        for name, each in (choice["logprobs"] or {}).items() if choice.get("logprobs") else ():
            logprobs[name] = each if each is None else [*logprobs.get(name, ()), *each]
    found["logprobs"] = logprobs
    if details := [each for choice in choices for each in choice.get("token_details", ())]:
        found["token_details"] = details
    return found


def nameless(answer: Any) -> str:
    """Without ids, which are random."""
    return re.sub(r"(call|msg|rs|fc)_[0-9a-f]{24}", "id", json.dumps(answer, sort_keys=True))


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=50)
@given(
    text=st.sampled_from(TEXTS),
    reasoning=st.sampled_from(Reasoning),
    stop=st.lists(st.sampled_from(STOPS), max_size=2),
    sizes=st.lists(st.integers(1, 9), max_size=70),
)
@example(TEXTS[0], Reasoning.OPEN, ["\nUser"], [3])  # the line break is held back
@example(TEXTS[1], Reasoning.OPEN, [], [1] * 9)  # the first token has no text
def test_an_answer_is_the_same_however_many_of_its_tokens_come_at_a_time(
    name: str, text: str, reasoning: Reasoning, stop: list[str], sizes: list[int]
) -> None:
    ids = ids_of(text)
    at_once = pieces_of(ids, (), stop, reasoning)
    cut = pieces_of(ids, sizes, stop, reasoning)
    wanted = nameless(whole(DIALECTS[name], at_once, reasoning))
    for told in (whole, streamed):
        assert nameless(told(DIALECTS[name], cut, reasoning)) == wanted
