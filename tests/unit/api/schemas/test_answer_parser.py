"""The text of an answer is taken apart in the same way, however it comes in pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_models.request import Reasoning
from vidspec_service.api.schemas.answer_parser import AnswerParser, CallFormat, message_from

NONE, TAGGED, OPEN = Reasoning
CALLS = CallFormat(
    heads={'<tool_call>\n{"name": "go", "arguments": ': "go"}, tail="}\n</tool_call>", opens="<tool_call>"
)
CALL = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
TEXTS: list[tuple[Reasoning, str, dict[str, Any], str]] = [
    (OPEN, "\nIt is\n\nred.\n</think>\n\nRed.\n", {"reasoning": "It is\n\nred.", "content": "Red.\n"}, "stop"),
    (OPEN, "<think>\nred\n</think>Red.", {"reasoning": "red", "content": "Red."}, "stop"),
    (OPEN, "</think>\n\nRed.", {"content": "Red."}, "stop"),
    (OPEN, "red </think> is </think>", {"reasoning": "red ", "content": " is </think>"}, "stop"),
    (OPEN, "It never ends\n", {"reasoning": "It never ends", "content": ""}, "stop"),
    (OPEN, "red\n</thi", {"reasoning": "red\n</thi", "content": ""}, "stop"),
    (OPEN, "", {"content": ""}, "stop"),
    (OPEN, f"red</think>\n\nSo:{CALL}", {"reasoning": "red", "content": "So:"}, "tool_calls"),
    (TAGGED, "\n<think>\nred\n</think>\n\nRed.", {"reasoning": "red", "content": "Red."}, "stop"),
    (TAGGED, "\n\nRed. <think>", {"content": "\n\nRed. <think>"}, "stop"),
    (TAGGED, "<thi", {"content": "<thi"}, "stop"),
    (TAGGED, CALL, {"content": None}, "tool_calls"),
    (NONE, "<think>red</think>Red.", {"content": "<think>red</think>Red."}, "stop"),
]


@pytest.mark.parametrize(("reasoning", "text", "message", "reason"), TEXTS)
@given(cuts=st.lists(st.integers(0, 70), max_size=7))
def test_reasoning_ends_where_the_model_says_so(
    reasoning: Reasoning, text: str, message: dict[str, Any], reason: str, cuts: list[int]
) -> None:
    parser = AnswerParser(CALLS, reasoning)
    places = sorted({0, *cuts, len(text)})
    deltas = [delta for start, end in pairwise(places) for delta in parser.push(text[start:end])]
    held, told = parser.finish("stop")
    found = message_from([*deltas, *held])
    assert (len(found.pop("tool_calls", [])), told) == (CALL in text, reason)
    assert found == message
    assert all(value for delta in deltas for value in delta.values()), "no delta is empty"


@given(cuts=st.lists(st.integers(0, 90), max_size=7))
def test_a_call_is_found_after_its_tag_was_spelt_in_text(cuts: list[int]) -> None:
    """Ordinary tokens can spell the tag, as in an answer about tool calls; grammars allow that as text."""
    said = 'Write <tool_call>\n{"name": "go" or <<tool_call> before '
    text = f"{said}{CALL} or <tool_call> {CALL} and <tool_call>."
    parser = AnswerParser(CALLS, NONE)
    deltas = [delta for start, end in pairwise(sorted({0, *cuts, len(text)})) for delta in parser.push(text[start:end])]
    held, reason = parser.finish("stop")
    message = message_from([*deltas, *held])
    assert (message["content"], len(message["tool_calls"]), reason) == (said, 2, "tool_calls")


def test_text_after_a_tag_that_is_spelt_in_it_comes_as_it_is_written() -> None:
    parser = AnswerParser(CALLS, NONE)
    assert parser.push("Write <tool_call>") == [{"content": "Write "}]
    assert message_from(parser.push(" and")) == {"content": "<tool_call> and"}
    assert parser.push(" then") == [{"content": " then"}]


def test_a_call_is_told_as_soon_as_its_name_is_known() -> None:
    (head,) = CALLS.heads
    (begun,) = AnswerParser(CALLS, NONE).push(head)
    assert begun["tool_calls"][0]["function"] == {"name": "go", "arguments": ""}


def test_reasoning_comes_as_it_is_written() -> None:
    parser = AnswerParser(None, OPEN)
    assert parser.push("It is") == [{"reasoning": "It is"}]
    assert parser.push(" red.\n</th") == [{"reasoning": " red."}]
    assert parser.is_thinking
    assert parser.push("ink>\n") == []
    assert not parser.is_thinking
    assert parser.push("\nRed") == [{"content": "Red"}]
    assert parser.push("\n") == [{"content": "\n"}]


def test_reasoning_that_nobody_wants_is_left_out() -> None:
    for text in ("red</think>Red.", "It never ends"):
        parser = AnswerParser(None, OPEN, shows_reasoning=False)
        said = message_from([*parser.push(text), *parser.finish("length")[0]])
        assert said == {"content": "Red." if "Red." in text else ""}
