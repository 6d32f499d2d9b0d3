"""Tools become a grammar, and a model's text becomes tool calls."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.fakes import INFO
from tests.unit.api.schemas.test_structured_output import END, tokenizer
from vidspec_models.grammar import GrammarCompiler
from vidspec_models.request import Reasoning, ToolFormat
from vidspec_service.api.grammars.checker import GrammarChecker
from vidspec_service.api.limits.admission import ANYONE
from vidspec_service.api.schemas.answer_parser import CLOSES, OPENS, AnswerParser, CallFormat, message_from
from vidspec_service.api.schemas.chat_completions import ChatCompletionRequest
from vidspec_service.api.schemas.conversation import Conversation
from vidspec_service.api.schemas.responses import ResponsesRequest
from vidspec_service.errors import InvalidRequest

POINT = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/X"}},
    "required": ["x"],
    "$defs": {"X": {"type": "integer"}},
}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOLS = [
    {"type": "function", "function": {"name": "go", "description": "Go there.", "parameters": POINT}},
    {"type": "function", "function": {"name": "call", "parameters": NAMED}},
    {"type": "function", "function": {"name": "stop"}},
]
KNOWS = replace(INFO, tool_format=ToolFormat.HERMES)
GO = '<tool_call>\n{"name": "go", "arguments": {"x": 3}}\n</tool_call>'


def asked(**fields: Any) -> Conversation:
    """A request with tools and free tool choice."""
    body = {"messages": [{"role": "user", "content": "Go."}], "tools": TOOLS, **fields}
    return ChatCompletionRequest.model_validate_json(json.dumps(body), strict=True).for_engine(KNOWS)


@cache
def tagged() -> PreTrainedTokenizerFast:
    """A tokenizer with Qwen's two tool tokens; they are not special tokens, so they appear in the text."""
    known = PreTrainedTokenizerFast.from_pretrained(tokenizer().name_or_path)
    known.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (OPENS, CLOSES)])
    return known


def allows(request: Conversation, text: str) -> bool:
    """Whether a model that knows the tags may write `text` and end there."""
    assert request.grammar is not None
    ids = tagged()(text, add_special_tokens=False)["input_ids"]
    mask = GrammarCompiler(tagged(), frozenset({END}), len(tagged())).mask(request.grammar.text)
    logits = mask(torch.zeros(len(ids) + 1, len(tagged())), [], ids)
    mask.check()
    return all(row[token] == 0 for row, token in zip(logits, [*ids, END], strict=True))


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"name": "go", "arguments": {"x": 3}}', True),
        ('{"name": "stop", "arguments": {}}', True),
        ('{"name": "call", "arguments": {"name": "a \\"} b"}}', True),
        ('{"name": "go", "arguments": {"x":  3}}', False),
        ('{"name": "go", "arguments": {"x": "3"}}', False),
        ('{"name": "go", "arguments": {"name": "a"}}', False),
        ('{"name": "run", "arguments": {}}', False),
        ("I go.", False),
    ],
)
def test_a_required_call_is_one_of_one_of_the_tools_with_arguments_by_its_schema(text: str, is_allowed: bool) -> None:
    assert allows(asked(tool_choice="required"), text) is is_allowed


def test_of_a_named_tool_only_the_arguments_are_written() -> None:
    request = asked(tool_choice={"type": "function", "function": {"name": "go"}})
    assert allows(request, '{"x": 3}')
    assert not allows(request, '{"name": "a"}')
    assert request.grammar is not None
    assert request.grammar.param == "tools.0.function.parameters"


def test_both_routes_make_the_same_of_the_same_tools() -> None:
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    text = {"format": {"type": "json_schema", "name": "point", "schema": POINT}}
    for choice in ("required", "auto"):
        body = {"input": "Go.", "tools": flat, "tool_choice": choice, "text": text}
        response = ResponsesRequest.model_validate_json(json.dumps(body), strict=True).for_engine(KNOWS)
        chat = asked(tool_choice=choice, response_format=AS_JSON)
        assert (response.grammar, response.template, response.turns) == (chat.grammar, chat.template, chat.turns)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("I will not.", True),
        ("a <tool_ call> b", True),
        (GO, True),
        (f"Well, {GO}\n{GO}", True),
        (f"Well, {GO} indeed", True),
        ("<tool_call>\nnothing\n</tool_call>", False),
        (GO.replace("3", '"3"'), False),
    ],
)
def test_auto_is_text_with_calls_in_it_if_the_model_wants_any(text: str, is_allowed: bool) -> None:
    assert allows(asked(), text) is is_allowed
    assert allows(asked(tool_choice="auto"), text) is is_allowed


def test_without_parallel_calls_there_is_one_at_most() -> None:
    request = asked(parallel_tool_calls=False)
    assert allows(request, f"Well, {GO}")
    assert not allows(request, f"{GO}\n{GO}")


AS_JSON = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"x": 3}', True),
        ('{"x":  3}', False),
        ('{"x": "3"}', False),
        ("I will not.", False),
        (GO, True),
        (f"{GO}\n{GO}", True),
        (f"Well, {GO}", False),
        (f'{GO}\n{{"x": 3}}', False),
        (GO.replace("3", '"3"'), False),
    ],
)
def test_where_text_must_be_json_auto_is_json_or_calls(text: str, is_allowed: bool) -> None:
    assert allows(asked(response_format=AS_JSON), text) is is_allowed
    assert allows(asked(guided_json=POINT, tool_choice="auto"), text) is is_allowed
    assert allows(asked(guided_json=json.dumps(POINT)), text) is is_allowed
    assert allows(asked(guided_json=POINT, structured_outputs={"json": POINT}), text) is is_allowed
    is_single = text.count(GO) < 2
    assert allows(asked(response_format=AS_JSON, parallel_tool_calls=False), text) is (is_allowed and is_single)


def test_where_a_call_is_required_the_format_of_text_changes_nothing() -> None:
    assert asked(tool_choice="required", response_format=AS_JSON).grammar == asked(tool_choice="required").grammar


def test_none_is_plain_text_and_the_model_is_told_of_no_tool() -> None:
    request = asked(tool_choice="none")
    assert request.grammar is None
    assert request.template is not None
    assert request.template.tools == ()


def test_the_template_gets_each_tool_in_openais_words_with_its_letters_as_they_are() -> None:
    sized = {"name": "size", "description": "Größe", "parameters": NAMED}
    request = asked(tools=[{"type": "function", "function": each} for each in (sized, {"name": "stop"})])
    assert request.template is not None
    nothing = '{"type": "object", "properties": {}, "additionalProperties": false}'
    assert request.template.tools == (
        f'{{"type": "function", "function": {json.dumps(sized, ensure_ascii=False)}}}',
        f'{{"type": "function", "function": {{"name": "stop", "description": "", "parameters": {nothing}}}}}',
    )


def test_arguments_that_a_schema_does_not_name_do_not_come_unless_it_says_so() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "at": {"type": "array", "items": {"$ref": "#/$defs/P"}},
            "free": {"type": "object", "additionalProperties": True},
            "by": {"type": "array", "items": {"anyOf": [point, {"type": "null"}]}},
            "named": {"type": "object", "additionalProperties": point},
            "numbered": {"type": "object", "patternProperties": {"^[0-9]$": point}, "additionalProperties": False},
        },
        "required": ["at", "free"],
        "$defs": {"P": point},
    }
    tools = [{"type": "function", "function": {"name": "go", "parameters": schema}}]
    request = asked(tools=tools, tool_choice="required")
    assert allows(request, '{"at": [{"x": 1}], "free": {"y": 1}, "by": [null, {"x": 1}]}')
    assert not allows(request, '{"at": [], "free": {}, "by": [{"x": 1, "y": 1}]}')
    for key, place in (("named", "a"), ("numbered", "1")):
        assert allows(request, f'{{"at": [], "free": {{}}, "{key}": {{"{place}": {{"x": 1}}}}}}')
        assert not allows(request, f'{{"at": [], "free": {{}}, "{key}": {{"{place}": {{"x": 1, "y": 1}}}}}}')
    assert not allows(request, '{"at": [{"x": 1, "y": 1}], "free": {}}')
    assert not allows(request, '{"at": [], "free": {}, "more": 1}')


@pytest.mark.parametrize(
    ("schema", "text", "is_allowed"),
    [
        ({"properties": {"at": {"type": "array", "prefixItems": [NAMED]}}}, '{"at": [{"name": "a", "x": 3}]}', False),
        ({"properties": {"at": {"type": "array", "items": [NAMED]}}}, '{"at": [{"name": "a", "x": 3}]}', False),
        (
            {"properties": {"at": {"items": [{}], "additionalItems": NAMED}}},
            '{"at": [1, {"name": "a", "x": 3}]}',
            False,
        ),
        ({"properties": {}, "anyOf": [NAMED]}, '{"name": "a"}', True),
        ({"properties": {}, "$ref": "#/$defs/N", "$defs": {"N": NAMED}}, '{"name": "a"}', True),
        ({"properties": {"at": {"type": "null"}}, "required": ["name"]}, '{"at": null, "name": "a"}', True),
    ],
)
def test_a_schema_is_closed_where_nothing_beside_its_properties_can_name_others(
    schema: dict[str, Any], text: str, is_allowed: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object", **schema}}}]
    assert allows(asked(tools=tools, tool_choice="required"), text) is is_allowed


@pytest.mark.parametrize(
    "part",
    [
        {"anyOf": [{**NAMED}, {"properties": {"z": {}}, "required": ["z"]}]},
        {"anyOf": [{"$ref": "#/$defs/N"}], "$defs": {"N": NAMED}},
        {"$ref": "#/$defs/N", "$defs": {"N": NAMED}},
    ],
)
def test_a_part_of_a_schema_does_not_shut_out_what_another_part_names(part: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], **part}
    tools = [{"type": "function", "function": {"name": "go", "parameters": schema}}]
    assert allows(asked(tools=tools, tool_choice="required"), '{"x": 3, "name": "a"}')


def test_objects_beside_a_choice_of_what_is_required_are_closed() -> None:
    schema = {"type": "object", "properties": {"at": NAMED}, "anyOf": [{"required": ["at"]}, {"required": ["to"]}]}
    tools = [{"type": "function", "function": {"name": "go", "parameters": schema}}]
    request = asked(tools=tools, tool_choice="required")
    assert allows(request, '{"at": {"name": "a"}}')
    assert not allows(request, '{"at": {"name": "a", "x": 3}}')


@pytest.mark.parametrize(
    "more",
    [
        {"description": 'Has no "allOf": in it.'},
        {"properties": {**NAMED["properties"], "allOf": {"const": {"allOf": []}}}},  # type: ignore[dict-item]
    ],
)
def test_a_schema_that_only_mentions_all_of_is_closed_like_any_other(more: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "go", "parameters": {**NAMED, **more}}}]
    request = asked(tools=tools, tool_choice="required")
    assert allows(request, '{"name": "a"}')
    assert not allows(request, '{"name": "a", "more": 1}')


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_arguments_may_be_records_as_zod_describes_them(choice: str) -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "set", "parameters": record}}]
    call = '{"name": "set", "arguments": {"a": 3}}'
    assert allows(
        asked(tools=tools, tool_choice=choice), call if choice == "required" else f"{OPENS}\n{call}\n{CLOSES}"
    )


SPACED = {**POINT, "x-guidance": {"key_separator": " : "}}


def test_each_tool_and_the_text_may_have_their_own_spaces() -> None:
    spaced = {"type": "function", "function": {"name": "set", "parameters": SPACED}}
    call = '{"name": "set", "arguments": {"x" : 3}}'
    request = asked(tools=[*TOOLS, spaced], tool_choice="required")
    assert allows(request, call)
    assert not allows(request, call.replace(" : ", ": "))
    assert allows(request, '{"name": "go", "arguments": {"x": 3}}')
    assert not allows(request, '{"name": "go", "arguments": {"x" : 3}}')
    form = {"type": "json_schema", "json_schema": {"name": "point", "schema": SPACED}}
    request = asked(tools=[*TOOLS, spaced], response_format=form)
    assert allows(request, f"{OPENS}\n{call}\n{CLOSES}")
    assert allows(request, '{"x" : 3}')
    assert not allows(request, '{ "x" : 3}')


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tools_schema_that_would_be_followed_in_another_way_is_refused_with_its_place(choice: str) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "\\"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    with pytest.raises(InvalidRequest, match="escape") as refusal:
        asked(tools=tools, tool_choice=choice)
    assert refusal.value.param == "tools.3.function.parameters"


def test_the_answer_beside_calls_may_be_a_record_as_zod_describes_it() -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}
    form = {"type": "json_schema", "json_schema": {"name": "record", "schema": record}}
    assert allows(asked(response_format=form), '{"a": 3}')


def test_what_all_of_adds_to_a_schema_is_not_shut_out() -> None:
    more = {**NAMED, "allOf": [{"properties": {"x": {"type": "integer"}}, "required": ["x"]}]}
    tools = [{"type": "function", "function": {"name": "go", "parameters": more}}]
    assert allows(asked(tools=tools, tool_choice="required"), '{"name": "a", "x": 3}')


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_schemas_of_tools_are_tried_like_any_other_without_the_models_own_tokens(choice: str) -> None:
    fine, odd = asked(tool_choice=choice).grammar, {**NAMED, "not": {"required": ["x"]}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    wrong = asked(tool_choice=choice, tools=tools)
    assert fine is not None
    assert wrong.grammar is not None
    with closing(GrammarChecker()) as check:
        asyncio.run(check.check(fine, ANYONE))
        with pytest.raises(InvalidRequest, match=r'tools: .*"not"'):
            asyncio.run(check.check(wrong.grammar, ANYONE))


BARE = CallFormat(heads={"": "go"})
AMONG = CallFormat(heads={'{"name": "go", "arguments": ': "go", '{"name": "stop", "arguments": ': "stop"}, tail="}")
TAGGED = asked().tool_use.call_format
TEXTS: list[tuple[CallFormat | None, str, str | None, list[tuple[str, str]]]] = [
    (BARE, '{"a": "no }\\" or }", "b": {"c": []}}', None, [("go", '{"a": "no }\\" or }", "b": {"c": []}}')]),
    (AMONG, '{"name": "stop", "arguments": {"x": {}}}', None, [("stop", '{"x": {}}')]),
    (TAGGED, "I <tool_> will not <tool", "I <tool_> will not <tool", []),
    (TAGGED, f"I go. {GO}\n{GO}", "I go. ", [("go", '{"x": 3}')] * 2),
    (TAGGED, GO, None, [("go", '{"x": 3}')]),
]


@pytest.mark.parametrize(("written", "text", "content", "calls"), TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_read_in_whatever_pieces_they_come(
    written: CallFormat, text: str, content: str | None, calls: list[tuple[str, str]], size: int
) -> None:
    parser = AnswerParser(written, Reasoning.NONE)
    deltas = [delta for at in range(0, len(text), size) for delta in parser.push(text[at : at + size])]
    last, reason = parser.finish("stop")
    message = message_from([*deltas, *last])
    found = message.get("tool_calls", [])
    assert message["content"] == content
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in found] == calls
    assert len({call["id"] for call in found}) == len(found)
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", ())]
    assert all("name" in piece or piece["arguments"] for piece in pieces), "a piece adds nothing"
    assert reason == ("tool_calls" if calls else "stop")


def test_what_was_cut_is_told_as_far_as_it_came() -> None:
    parser = AnswerParser(AMONG, Reasoning.NONE)
    deltas = parser.push('{"name": "go", "arguments": {"x": "}')
    assert message_from(deltas)["tool_calls"][0]["function"] == {"name": "go", "arguments": '{"x": "}'}
    assert parser.finish("length") == ([], "length")
    nameless = AnswerParser(AMONG, Reasoning.NONE)
    assert nameless.push('{"name": ') == []
    assert nameless.finish("length") == ([{"content": '{"name": '}], "length")


@given(st.sampled_from([each for each in TEXTS if each[3]]), st.data())
def test_there_is_something_to_call_only_if_the_last_call_is_whole(case: Any, data: st.DataObject) -> None:
    """A `stop` string may cut an answer anywhere."""
    written, text, _, _ = case
    parser = AnswerParser(written, Reasoning.NONE)
    deltas = parser.push(text[: data.draw(st.integers(0, len(text)))])
    last, reason = parser.finish("stop")
    found = [call["function"]["arguments"] for call in message_from([*deltas, *last]).get("tool_calls", [])]
    assert reason == ("tool_calls" if found and is_json(found[-1]) else "stop")
    assert all(is_json(each) for each in found[:-1])


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
