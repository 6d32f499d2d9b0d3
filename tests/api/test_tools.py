"""Tools over HTTP: the engine's request, the client's answer, and what is refused before a video is decoded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.chat import ASK, VIDEO, ask, user
from tests.api.world import World
from tests.fakes import FINISHED, INFO, PROMPT_READY, FakeEngine
from vidspec_models.request import ToolCall, ToolFormat
from vidspec_service.engine.types import FinishReason, TextDelta

pytestmark = [pytest.mark.api, pytest.mark.anyio]

GO = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "go", "description": "Go.", "parameters": GO, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "go"}}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "go", "arguments": '{"x": 3}'}}


def engine(*texts: str, knows: ToolFormat = ToolFormat.NONE, reason: FinishReason = FinishReason.STOP) -> FakeEngine:
    deltas = [TextDelta(text=text, num_tokens=1) for text in texts]
    made = FakeEngine(PROMPT_READY, *deltas, replace(FINISHED, finish_reason=reason))
    made.known = replace(INFO, tool_format=knows)
    return made


def function(**changed: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "go", "parameters": GO, **changed}}]


MANY = [
    {"type": "function", "function": {"name": f"f{n}", "parameters": {**GO, "description": "x" * 800}}}
    for n in range(100)
]
UNASKED: list[dict[str, Any]] = [
    {"tools": TOOLS, "response_format": {"type": "json_object"}},
    {"tools": TOOLS, "ignore_eos": True},
    {"tools": MANY},
    {"tools": function(parameters={**GO, "not": {}})},
]


def chunks(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_a_named_tool_is_called_with_what_the_model_writes(tmp_path: Path) -> None:
    world = World(tmp_path, engine('{"x"', ": 3}"))
    answer = (await ask(world, tools=TOOLS, tool_choice=NAMED)).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "go", "arguments": '{"x": 3}'}}
    (asked,) = world.engine.requests
    assert asked.grammar is not None
    assert '"x"' in asked.grammar
    assert asked.template is not None
    assert [json.loads(tool)["function"]["name"] for tool in asked.template.tools] == ["go", "stop"]


def only(*names: str, mode: str = "required") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_of_the_tools_that_the_prompt_shows_only_the_allowed_ones_can_be_called(tmp_path: Path) -> None:
    """As OpenAI has it: the prompt stays the same, and so does its cache, while an agent changes what is allowed."""
    world = World(tmp_path, engine('{"x": 3}', knows=ToolFormat.HERMES))
    (choice,) = (await ask(world, tools=TOOLS, tool_choice=only("go"))).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "go", "arguments": '{"x": 3}'}
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "go"}]}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body: dict[str, Any] = {"input": "Go.", "tools": tools, "tool_choice": flat}
    answer = (await world.client.post("/v1/responses", json=body)).json()
    assert (answer["tool_choice"], answer["output"][0]["name"]) == (flat, "go")
    assert (await ask(world, tools=TOOLS, tool_choice=only("go", mode="auto"))).status_code == 200
    flat_auto = {**body, "tool_choice": {**flat, "mode": "auto"}}
    assert (await world.client.post("/v1/responses", json=flat_auto)).status_code == 200
    ours, theirs, free, their_free = world.engine.requests
    assert (ours.grammar, free.grammar) == (theirs.grammar, their_free.grammar)
    for asked in world.engine.requests:
        assert asked.template is not None
        assert len(asked.template.tools) == 2
    assert free.grammar is not None
    assert [word in free.grammar for word in ("<tool_call>", "go", "stop")] == [True, True, False]


async def test_a_required_call_is_streamed_in_pieces(tmp_path: Path) -> None:
    world = World(tmp_path, engine('{"name": "st', 'op", "argu', 'ments": {', "}}"))
    found = chunks((await ask(world, tools=TOOLS, tool_choice="required", stream=True)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    (begun,) = deltas[1]["tool_calls"]
    assert begun.pop("id").startswith("call_")
    assert begun == {"index": 0, "type": "function", "function": {"name": "stop", "arguments": ""}}
    rest = [delta["tool_calls"] for delta in deltas[2:-1]]
    assert rest == [[{"index": 0, "function": {"arguments": text}}] for text in ("{", "}")]
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_model_that_knows_tools_chooses(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "go", "arguments": {"x": 3}}\n</tool_call>'
    for text, content, names in (("I stay.", "I stay.", []), (f"{call}\n{call}", None, ["go", "go"])):
        world = World(tmp_path, engine(text, knows=ToolFormat.HERMES))
        (choice,) = (await ask(world, tools=TOOLS)).json()["choices"]
        message = choice["message"]
        assert message["content"] == content
        assert [each["function"]["name"] for each in message.get("tool_calls", ())] == names
        assert choice["finish_reason"] == ("tool_calls" if names else "stop")


async def test_an_agent_gets_its_calls_first_and_its_json_at_last(tmp_path: Path) -> None:
    """Agents send the format of their last answer with every request."""
    call = '<tool_call>\n{"name": "go", "arguments": {"x": 3}}\n</tool_call>'
    for text, content, names in (('{"y": 1}', '{"y": 1}', []), (call, None, ["go"])):
        world = World(tmp_path, engine(text, knows=ToolFormat.HERMES))
        (choice,) = (await ask(world, tools=TOOLS, response_format={"type": "json_object"})).json()["choices"]
        assert choice["message"]["content"] == content
        assert [each["function"]["name"] for each in choice["message"].get("tool_calls", ())] == names
    world = World(tmp_path, engine('{"x": 3}'))
    forced = await ask(world, tools=TOOLS, tool_choice=NAMED, response_format={"type": "json_object"})
    assert forced.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("knows", [ToolFormat.NONE, ToolFormat.OTHER])
async def test_tools_that_a_frontend_always_sends_leave_text_where_the_model_can_call_none(
    tmp_path: Path, knows: ToolFormat
) -> None:
    """The client sends no `tool_choice`, so no call is required, and the model is not told of the tools."""
    world = World(tmp_path, engine("A red square.", knows=knows))
    (choice,) = (await ask(world, tools=TOOLS)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("A red square.", "stop")
    (asked,) = world.engine.requests
    assert asked.grammar is None
    assert asked.template is not None
    assert asked.template.tools == ()


async def test_a_model_that_writes_calls_in_another_way_cannot_be_asked_to_choose(tmp_path: Path) -> None:
    world = World(tmp_path, engine(knows=ToolFormat.OTHER))
    response = await ask(world, tools=TOOLS, tool_choice="auto")
    world.assert_refused(response, "tool_choice", "writes calls in a format not supported here, so auto is not")


@pytest.mark.parametrize("fields", UNASKED)
async def test_tools_that_the_model_cannot_call_stand_in_the_way_of_nothing(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    world = World(tmp_path)
    response = await ask(world, **fields)
    assert response.status_code == 200, response.text
    (asked,) = world.engine.requests
    assert (asked.grammar is not None) == ("response_format" in fields)
    assert asked.ignore_eos == ("ignore_eos" in fields)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({**UNASKED[0], "response_format": None, "guided_regex": "a"}, "tools", "not guided_regex and tools"),
        (UNASKED[1], "ignore_eos", "ends where its grammar ends"),
        (UNASKED[2], "tools", "65536"),
        (UNASKED[3], "tools", 'Unimplemented keys: ["not"]'),
    ],
)
async def test_of_tools_that_the_model_may_call_the_answer_has_the_form(
    tmp_path: Path, fields: dict[str, Any], param: str, words: str
) -> None:
    for choice in ({}, {"tool_choice": "auto"}):
        world = World(tmp_path, engine(knows=ToolFormat.HERMES))
        world.assert_refused(await ask(world, **fields, **choice), param, words)


async def test_text_that_might_have_begun_a_call_is_told_at_the_end(tmp_path: Path) -> None:
    text = "I write <tool"
    world = World(tmp_path, engine(text, knows=ToolFormat.HERMES))
    (choice,) = (await ask(world, tools=TOOLS)).json()["choices"]
    found = chunks((await ask(world, tools=TOOLS, stream=True)).text)
    body = {"input": "Go.", "tools": [{"type": "function", "name": "go"}]}
    (item,) = (await world.client.post("/v1/responses", json=body)).json()["output"]
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found)
    assert [choice["message"]["content"], streamed, item["content"][0]["text"]] == [text] * 3


@pytest.mark.parametrize("reason", FinishReason)
async def test_a_call_that_max_tokens_or_a_stop_string_cut_says_so(tmp_path: Path, reason: FinishReason) -> None:
    world = World(tmp_path, engine('{"x"', reason=reason))
    (choice,) = (await ask(world, tools=TOOLS, tool_choice=NAMED)).json()["choices"]
    assert choice["finish_reason"] == reason
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x"'


async def test_a_call_that_is_cut_before_it_begins_is_no_call(tmp_path: Path) -> None:
    """As in a stream: a client cannot read empty arguments."""
    world = World(tmp_path, engine())
    message = (await ask(world, tools=TOOLS, tool_choice=NAMED, stop="{")).json()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == ("", None)


async def test_calls_and_results_are_turns_where_the_template_shows_them(tmp_path: Path) -> None:
    turns = [
        user(VIDEO, ASK),
        {"role": "assistant", "content": None, "tool_calls": [{**CALLED, "index": 0}], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "Arrived.", "name": "go"},
    ]
    world = World(tmp_path, engine("ok", knows=ToolFormat.OTHER))
    assert (await ask(world, messages=turns)).status_code == 200
    _, called, result = world.engine.requests[0].turns
    assert called.tool_calls == (ToolCall(call_id="call_1", name="go", arguments='{"x": 3}'),)
    assert (result.role, result.tool_call_id, result.text) == ("tool", "call_1", "Arrived.")
    silent = [*turns[:2], {**turns[2], "content": ""}]
    assert (await ask(world, messages=silent)).status_code == 200, "a function that returns nothing"
    assert world.engine.requests[1].turns == (*world.engine.requests[0].turns[:2], replace(result, parts=()))
    response = await ask(World(tmp_path), messages=turns)
    assert response.status_code == 400
    assert "put them in user messages" in response.json()["error"]["message"]


async def test_a_call_without_arguments_may_say_so_with_empty_text(tmp_path: Path) -> None:
    """As in vLLM: other servers answer so where a function has no parameters."""
    world = World(tmp_path, engine("ok", knows=ToolFormat.HERMES))
    assert (await ask(world, messages=turns(calls=[called_with("")]))).status_code == 200
    assert world.engine.requests[0].turns[1].tool_calls == (ToolCall(call_id="call_1", name="go", arguments="{}"),)


LONG = json.dumps({"x": "x" * 50_000})


def called_with(arguments: str) -> dict[str, Any]:
    return {**CALLED, "function": {"name": "go", "arguments": arguments}}


def turns(*, calls: Any = None, **result: Any) -> list[Any]:
    called = {"role": "assistant", "tool_calls": [CALLED] if calls is None else calls}
    return [user(ASK), called, {"role": "tool", "tool_call_id": "call_1", "content": "x", **result}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice", "does not support tools, so auto is not possible"),
        ({"tool_choice": "required"}, "tool_choice", "at least one tool"),
        ({"tools": [], "tool_choice": NAMED}, "tool_choice", "no tool in tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "'function', 'allowed_tools'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"tools": TOOLS, "tool_choice": only("go", "run")}, "tool_choice", "no tool in tools"),
        ({"tools": TOOLS, "tool_choice": only("go", mode="auto")}, "tool_choice", "auto is not possible"),
        ({"tools": TOOLS * 2, "tool_choice": "required"}, "tools.2.function.name", "another tool"),
        ({"tools": TOOLS * 65}, "tools", "128"),
        ({"tools": function(name="a b")}, "tools.0.function.name", "match"),
        ({"tools": function(parameters={"type": "string"})}, "tools.0.function.parameters", "must be object"),
        ({"tools": function(parameters={"properties": {}})}, "tools.0.function.parameters", "must be object"),
        (
            {"tools": function(parameters={**GO, "not": {}}), "tool_choice": "required"},
            "tools.0.function.parameters", 'Unimplemented keys: ["not"]',
        ),
        (
            {"tools": [*TOOLS, *function(name="x", parameters={**GO, "not": {}})], "tool_choice": "required"},
            "tools", "not",
        ),
        ({"tools": TOOLS, "tool_choice": NAMED, "guided_regex": "a"}, "tools.0.function.parameters", "one field"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"messages": turns(calls=[{**CALLED, "id": "a<b"}])}, "messages.1.tool_calls.0.id", "match"),
        (
            {"messages": turns(calls=[called_with("[]")])},
            "messages.1.tool_calls.0.function.arguments", "a JSON object",
        ),
        (
            {"messages": turns(calls=[called_with('{"x": ')])},
            "messages.1.tool_calls.0.function.arguments", "max_tokens or a stop string cut the call",
        ),
        (
            {"messages": turns(calls=[called_with('{"a":' * 20_000)])},
            "messages.1.tool_calls.0.function.arguments", "nested too deeply",
        ),
        (
            {"messages": [user({**ASK, "text": "x" * 150_000}), *turns(calls=[called_with(LONG)])[1:]]},
            "messages", "All messages together",
        ),
        ({"messages": turns(tool_call_id=None)}, "messages.2.role", "tool_call_id"),
        ({"messages": turns(role="user")}, "messages.2.role", "tool_call_id"),
        ({"messages": turns(calls=[CALLED] * 129)}, "messages.1.tool_calls", "128"),
        ({"messages": [{**user(ASK), "tool_calls": [CALLED]}]}, "messages.0.tool_calls", "Only assistant messages"),
        (
            {"tools": [*function(description=LONG * 2), *function(name="x", description=LONG * 2)]},
            "tools", "All tools together",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_called_is_a_400_that_says_why(
    tmp_path: Path, fields: dict[str, Any], param: str, words: str
) -> None:
    world = World(tmp_path)
    response = await ask(world, **fields)
    world.assert_refused(response, param, words)
