"""/v1/responses: the same questions in OpenAI's newer API, answered whole and as named events."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseStreamEvent
from openai.types.responses.response_input_param import FunctionCallOutput
from pydantic import Field, TypeAdapter

from tests.api.chat import IMAGE_URL, VIDEO, ask
from tests.api.world import DATA_URL, World
from tests.fakes import ANSWER, FINISHED, INFO, PROMPT_READY, FakeEngine, token_deltas
from vidspec_models.request import Reasoning, ToolCall, ToolFormat, Turn
from vidspec_service.engine.types import Finished, FinishReason, TextDelta
from vidspec_service.errors import GenerationFailed

pytestmark = [pytest.mark.api, pytest.mark.anyio]

FILE = {"type": "input_file", "file_data": DATA_URL, "filename": "clip.mp4"}
TEXT = {"type": "input_text", "text": "What moves?"}
TOOL = {"type": "function", "name": "go", "strict": True, "parameters": {"type": "object", "properties": {}}}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "go",
    "arguments": "{}",
    "status": "completed",
}
EVENT: TypeAdapter[Any] = TypeAdapter(Annotated[ResponseStreamEvent, Field(discriminator="type")])
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"not": {}}}


async def respond(world: World, *parts: Any, **fields: Any) -> httpx.Response:
    body = {"model": "fake-target", "input": [{"role": "user", "content": list(parts or (FILE, TEXT))}], **fields}
    return await world.client.post("/v1/responses", json=body)


def events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_whole_answer(tmp_path: Path) -> None:
    world = World(tmp_path)
    fields = {"instructions": "Be brief.", "temperature": 0.5, "max_output_tokens": 9, "store": False}
    answer = (await respond(world, **fields)).json()
    assert answer["id"].startswith("resp_")
    (message,) = answer["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "A red squäre.", "annotations": []}]
    assert answer["usage"] == {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0, "video_tokens": 30},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 45,
    }  # fmt: skip
    told = {name: answer[name] for name in answer if name not in {"id", "created_at", "output", "usage"}}
    assert told == {
        "object": "response", "status": "completed", "model": "fake-target", "background": False, "error": None,
        "incomplete_details": None, "max_tool_calls": None, "metadata": {}, "parallel_tool_calls": True,
        "previous_response_id": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", **fields,
    }  # fmt: skip
    (asked,) = world.engine.requests
    assert asked.turns == (
        Turn(role="system", parts=("Be brief.",)),
        Turn(role="user", parts=(None, "What moves?")),
    )
    assert (asked.max_tokens, asked.sampling.temperature, len(asked.videos)) == (9, 0.5, 1)


async def test_instructions_come_before_the_system_messages_of_the_input(tmp_path: Path) -> None:
    world = World(tmp_path)
    told = [
        {"role": "developer", "content": "Name colours."},
        {"role": "system", "content": [{"type": "input_text", "text": "Say where."}]},
        {"role": "user", "content": "What moves?"},
    ]
    assert (await respond(world, instructions="Be brief.", input=told)).status_code == 200
    assert world.engine.requests[0].turns == (
        Turn(role="system", parts=("Be brief.\n\nName colours.\n\nSay where.",)),
        Turn(role="user", parts=("What moves?",)),
    )


FORM = {"type": "json_schema", "name": "x", "schema": {"const": None}}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, {"temperature": 0.7, "top_p": 0.8, "tool_choice": "auto", "text": {"format": {"type": "text"}}}),
        ({"store": None}, {"store": False}),
        ({"temperature": None, "top_p": 0.5}, {"temperature": 0.7, "top_p": 0.5}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"parallel_tool_calls": None, "text": None}, {"parallel_tool_calls": True}),
        ({"tools": [TOOL]}, {"tool_choice": "none"}),
        ({"text": {"format": {"type": "json_object"}}}, {"text": {"format": {"type": "json_object"}}}),
        ({"text": {"format": FORM}}, {"text": {"format": FORM}}),
        ({"text": {"verbosity": "low"}}, {"text": {"format": {"type": "text"}, "verbosity": "low"}}),
    ],
)
async def test_an_answer_tells_what_was_used(tmp_path: Path, fields: dict[str, Any], told: dict[str, Any]) -> None:
    engine = FakeEngine()
    engine.known = replace(INFO, default_sampling={"temperature": 0.7, "top_p": 0.8})
    world = World(tmp_path, engine)
    answer = (await respond(world, **fields)).json()
    assert {name: answer[name] for name in told} == told
    (asked,) = engine.requests
    assert (answer["temperature"], answer["top_p"]) == (asked.sampling.temperature, asked.sampling.top_p)


async def test_an_answer_tells_what_null_stands_for(tmp_path: Path) -> None:
    world = World(tmp_path)
    answer = (await respond(world, temperature=None, top_p=None)).json()
    (asked,) = world.engine.requests
    assert (answer["temperature"], answer["top_p"]) == (asked.sampling.temperature, asked.sampling.top_p) == (0.0, 1.0)


NAMED = {"name": "x", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}, "strict": True}


@pytest.mark.parametrize(
    ("form", "chat_form"),
    [
        ({"type": "json_schema", **NAMED}, {"type": "json_schema", "json_schema": NAMED}),
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "text"}, {"type": "text"}),
        (None, None),
    ],
)
async def test_it_asks_the_engine_what_chat_completions_asks(tmp_path: Path, form: Any, chat_form: Any) -> None:
    world = World(tmp_path)
    said: dict[str, Any] = {"seed": 3, "num_frames": 2, "top_k": 4}
    assert (await respond(world, text={"format": form}, **said)).is_success
    assert (await ask(world, response_format=chat_form, **said)).is_success
    ours, theirs = (replace(request, request_id="", videos=()) for request in world.engine.requests)
    assert ours == theirs
    assert (ours.grammar is None) == (form in (None, {"type": "text"}))
    assert len(world.decoder.requests) == 1, "the second had other frames than the first"


@pytest.mark.parametrize(
    "part",
    [FILE, VIDEO, {"type": "input_video", "input_video": {"data": DATA_URL}},
     {"type": "input_video", "video_url": DATA_URL},
     {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto", "file_id": None},
     {"type": "input_file", "file_data": IMAGE_URL}],
)  # fmt: skip
async def test_videos_and_images_come_in_the_parts_that_clients_use(tmp_path: Path, part: Any) -> None:
    world = World(tmp_path)
    response = await respond(world, part, TEXT)
    assert response.status_code == 200, response.text
    assert len(world.engine.requests[0].videos) == 1


@pytest.mark.parametrize("instructions", [None, " \n", "Be brief."])
async def test_a_string_is_a_question_that_instructions_may_precede(tmp_path: Path, instructions: str | None) -> None:
    world = World(tmp_path)
    assert (await respond(world, input="What moves?", instructions=instructions)).is_success
    *told, question = world.engine.requests[0].turns
    assert question == Turn(role="user", parts=("What moves?",))
    assert told == ([Turn(role="system", parts=("Be brief.",))] if instructions == "Be brief." else [])


async def test_every_message_may_have_videos(tmp_path: Path) -> None:
    world = World(tmp_path)
    asked = [{"role": "user", "content": parts} for parts in ([FILE, TEXT], [{**FILE, "file_data": IMAGE_URL}, TEXT])]
    assert (await respond(world, input=[asked[0], {"role": "assistant", "content": "It."}, asked[1]])).is_success
    assert sorted(each.is_still for each in world.decoder.requests) == [False, True]
    assert [turn.num_videos for turn in world.engine.requests[0].turns] == [1, 0, 1]


async def test_an_answers_items_can_be_sent_back(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    world = World(tmp_path, engine)
    output = (await respond(world)).json()["output"]
    done = {"type": "function_call_output", "call_id": "call_1", "output": "Arrived."}
    turns = [{"role": "user", "content": "Go."}, *output, CALL, {**CALL, "call_id": "call_2"}, done]
    assert (await respond(world, input=turns)).is_success
    _, said, result = world.engine.requests[1].turns
    calls = tuple(ToolCall(call_id=name, name="go", arguments="{}") for name in ("call_1", "call_2"))
    assert said == Turn(role="assistant", parts=("A red squäre.",), tool_calls=calls)
    assert result == Turn(role="tool", parts=("Arrived.",), tool_call_id="call_1")


async def test_messages_of_an_assistant_stay_apart_and_what_it_says_after_a_call_comes_after_it(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    said = [{"role": "assistant", "content": text} for text in ("I went.", "I go on.")]
    asked = {"role": "user", "content": "Go."}
    assert (await respond(World(tmp_path, engine), input=[asked, CALL, *said, CALL, asked])).is_success
    assert [(turn.text, len(turn.tool_calls)) for turn in engine.requests[0].turns[1:-1]] == [
        ("", 1), ("I went.", 0), ("I go on.", 1),
    ]  # fmt: skip


async def test_items_can_be_sent_back_with_every_field_that_openais_client_gives_them(tmp_path: Path) -> None:
    """With `model_dump`, which writes fields that the answer does not have as null."""
    engine = FakeEngine()
    engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    world = World(tmp_path, engine)
    (message,) = (await respond(world)).json()["output"]
    items = ResponseOutputMessage.model_validate(message), ResponseFunctionToolCall.model_validate(CALL)
    dumped = [item.model_dump(mode="json", by_alias=True) for item in items]
    done = {"type": "function_call_output", "call_id": "call_1", "output": "Arrived."}
    result = {**dict.fromkeys(FunctionCallOutput.__annotations__), **done, "name": "go"}
    response = await respond(world, input=[{"role": "user", "content": "Go."}, *dumped, result])
    assert response.status_code == 200, response.text


async def test_an_answer_that_says_nothing_and_a_function_that_returns_nothing_can_be_sent_back(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(PROMPT_READY, FINISHED)
    engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    world = World(tmp_path, engine)
    output = (await respond(world)).json()["output"]
    assert output[0]["content"][0]["text"] == ""
    calls = [{**CALL, "call_id": name} for name in ("call_1", "call_2")]
    done = [{"type": "function_call_output", "call_id": call["call_id"], "output": ""} for call in calls]
    assert (await respond(world, input=[{"role": "user", "content": "Go."}, *output, *calls, *done])).is_success
    _, said, *results = world.engine.requests[1].turns
    assert (said.parts, len(said.tool_calls)) == ((), 2)
    assert results == [Turn(role="tool", parts=(), tool_call_id=name) for name in ("call_1", "call_2")]


async def test_a_function_may_return_parts_of_text(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    world = World(tmp_path, engine)
    parts = [{"type": "input_text", "text": text} for text in ("Arrived.", "Tired.")]
    done = {"type": "function_call_output", "call_id": "call_1", "output": parts}
    assert (await respond(world, input=[{"role": "user", "content": "Go."}, CALL, done])).is_success
    assert engine.requests[0].turns[-1] == Turn(role="tool", parts=("Arrived.\nTired.",), tool_call_id="call_1")


async def test_a_stream_has_the_events_of_a_message_in_their_order(tmp_path: Path) -> None:
    found = events((await respond(World(tmp_path), stream=True)).text)
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event.get("delta", "") for event in found) == "A red squäre."
    assert [event["output_index"] for event in found[2:-1]] == [0] * 7
    assert {event["content_index"] for event in found[3:-2]} == {0}
    assert found[0]["response"]["status"] == "in_progress"
    whole = found[-1]["response"]
    assert whole["output"] == [found[-2]["item"]]
    assert whole["output"][0]["content"][0]["text"] == "A red squäre."
    assert whole["usage"]["total_tokens"] == 45


async def test_a_call_is_an_item_whole_and_streamed(tmp_path: Path) -> None:
    engine = FakeEngine(PROMPT_READY, TextDelta(text="{", num_tokens=1), TextDelta(text="}", num_tokens=1), FINISHED)
    world = World(tmp_path, engine)
    choice = {"type": "function", "name": "go"}
    (item,) = (await respond(world, tools=[TOOL], tool_choice=choice)).json()["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "go", "{}")
    assert item["status"] == "completed"
    found = events((await respond(world, tools=[TOOL], tool_choice=choice, stream=True)).text)
    assert [event["type"].removeprefix("response.") for event in found[2:]] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert (found[2]["item"]["status"], found[-2]["item"]["status"]) == ("in_progress", "completed")
    assert found[-2]["item"]["arguments"] == "{}"
    assert found[-1]["response"]["tools"][0]["name"] == "go"


async def test_what_max_tokens_cut_is_incomplete(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER[:-1], replace(FINISHED, finish_reason=FinishReason.LENGTH)))
    whole = (await respond(world)).json()
    last = events((await respond(world, stream=True)).text)[-1]
    assert last["type"] == "response.incomplete"
    for answer in (whole, last["response"]):
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in answer["output"]] == ["incomplete"]


def put_together(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client makes of the events of a stream."""
    items: list[dict[str, Any]] = []
    for event in told:
        if "output_index" not in event:
            continue
        kind, stage = event["type"].split(".")[-2:]
        if (kind, stage) == ("output_item", "added"):
            items.append(event["item"])
        item = items[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        if (kind, stage) == ("content_part", "added"):
            item["content"].append(event["part"])
        if (kind, stage) == ("output_item", "done"):
            item["status"] = event["item"]["status"]
        part = item["content"][event["content_index"]] if "content_index" in event else item
        if stage == "delta":
            part["text" if "text" in part else "arguments"] += event["delta"]
            if "logprobs" in event:
                part["logprobs"] = [*part.get("logprobs", ()), *event["logprobs"]]
        if stage == "done":
            told_again = event.get("item") or event.get("part") or {**part, **event, "type": part["type"]}
            assert part == {name: told_again[name] for name in told_again if name in part or name == "logprobs"}
    return items


async def test_openais_client_can_put_an_answer_together_from_its_events(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "go", "arguments": {"x": 3}}\n</tool_call>'
    texts = ("It ", "is.", "</think>", "\n\n", "I ", "go. ", call[:45], call[45:], "\n", call)
    engine = FakeEngine(replace(PROMPT_READY, reasoning=Reasoning.OPEN), *token_deltas(*texts), FINISHED)
    engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    asked = {"tools": [TOOL], "include": ["message.output_text.logprobs"]}
    found = events((await respond(World(tmp_path, engine), stream=True, **asked)).text)
    for event in found:
        EVENT.validate_python(event)
    *told_before, last = found
    answer = last["response"]
    assert put_together(told_before) == answer["output"]
    assert [(item["type"], item["status"]) for item in answer["output"]] == [
        (kind, "completed") for kind in ("reasoning", "message", "function_call", "function_call")
    ]
    assert [item["id"].split("_")[0] for item in answer["output"]] == ["rs", "msg", "fc", "fc"]
    assert [item["call_id"][:5] for item in answer["output"][2:]] == ["call_", "call_"]
    assert len({item["call_id"] for item in answer["output"][2:]}) == 2
    assert [event["name"] for event in found if event["type"].endswith("arguments.done")] == ["go", "go"]
    assert "logprobs" not in answer["output"][0]["content"][0], "what a model thinks has none"
    told = answer["output"][1]["content"][0]["logprobs"]
    assert [each["token"] for each in told] == ["\n\n", "I ", "go. "], "nor has a call"
    assert answer["created_at"] > 1_700_000_000


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [(("A red", ""), ("A red", "")), (("",), ("",)), (("Red", ".\nUs", "er"), ("Red", ".", ""))],  # "\nUser" ends it
)
async def test_log_probabilities_of_tokens_that_add_no_text_are_in_a_delta_too(
    tmp_path: Path, tokens: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    deltas = [replace(delta, text=text) for delta, text in zip(token_deltas(*tokens), texts, strict=True)]
    world = World(tmp_path, FakeEngine(PROMPT_READY, *deltas, FINISHED))
    found = events((await respond(world, stream=True, include=["message.output_text.logprobs"])).text)
    for event in found:
        EVENT.validate_python(event)
    told = [each["token"] for event in found if event["type"].endswith("text.delta") for each in event["logprobs"]]
    assert told == list(tokens)
    assert put_together(found[:-1]) == found[-1]["response"]["output"]


@pytest.mark.parametrize("reason", FinishReason)
async def test_a_call_that_was_cut_is_incomplete_whole_and_streamed(tmp_path: Path, reason: FinishReason) -> None:
    """Cut by `max_output_tokens`, or by a `stop` string inside the call."""
    cut = TextDelta(text='{"a": "b', num_tokens=1)
    world = World(tmp_path, FakeEngine(PROMPT_READY, cut, replace(FINISHED, finish_reason=reason)))
    choice = {"type": "function", "name": "go"}
    whole = (await respond(world, tools=[TOOL], tool_choice=choice)).json()
    *_, done, last = events((await respond(world, tools=[TOOL], tool_choice=choice, stream=True)).text)
    assert done["item"] == last["response"]["output"][0]
    for answer in (whole, last["response"]):
        (item,) = answer["output"]
        assert (item["arguments"], item["status"]) == ('{"a": "b', "incomplete")


@pytest.mark.parametrize("end", [replace(FINISHED, finish_reason=FinishReason.LENGTH), GenerationFailed("lost")])
async def test_a_whole_call_stays_whole_where_the_next_is_cut_before_its_name_is_known(
    tmp_path: Path, end: Finished | GenerationFailed
) -> None:
    called = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>\n<tool_call>\n{"na'
    engine = FakeEngine(PROMPT_READY, TextDelta(text=called, num_tokens=1), end)
    engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    world = World(tmp_path, engine)
    *_, done, ended = events((await respond(world, tools=[TOOL], stream=True)).text)
    assert done["type"] == "response.output_item.done", "a client may run the tool as soon as its call is complete"
    last = ended["response"]
    answers = [last] if isinstance(end, Exception) else [last, (await respond(world, tools=[TOOL])).json()]
    for answer in answers:
        assert answer["status"] == ("failed" if isinstance(end, Exception) else "incomplete")
        assert [(item["name"], item["arguments"], item["status"]) for item in answer["output"]] == [
            ("go", "{}", "completed")
        ]


async def test_a_stream_that_fails_ends_with_an_event_that_says_so(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(PROMPT_READY, ANSWER[1], GenerationFailed("secret")))
    last = events((await respond(world, stream=True)).text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["error"]["message"].startswith("The server failed to answer (request id ")
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "c"}, "conversation", "does not store answers"),
        ({"background": True}, "background", "does not store answers"),
        ({"truncation": "auto"}, "truncation", "refuses"),
        ({"logprobs": True}, "logprobs", "use include"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"input": None}, "input", ""),
        ({"input": []}, "input", ""),
        ({"input": ["What moves?"]}, "input.0", "an object"),
        ({"input": [None]}, "input.0", "an object"),
        ({"input": [[{"role": "user", "content": "a"}]]}, "input.0", "an object"),
        ({"input": [{"type": {"a": 1}}]}, "input.0", "its type must be one of"),
        ({"input": [{"type": "compaction"}]}, "input.0", "'function_call_output', 'reasoning'."),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "does not store items"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input.0.role", "the role user"),
        ({"instructions": "a", "input": [{"role": "system", "content": "b"}]}, "input.0.role", "the role user"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "input.1.role", "Only the"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input.0.content.0", "not accept audio"),
        (
            {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": [{}]}]}]},
            "input.0.content.0.annotations", "at most 0 items",
        ),
        ({"input": [{"role": "user", "content": [{"type": "text"}]}]}, "input.0.content.0", "'input_video'."),
        ({"input": [{"role": "user", "content": []}]}, "input.0.content", "at least 1 item"),
        ({"input": [{"role": "user", "content": [TEXT] * 65}]}, "input.0.content", "at most 64 items"),
        (
            {"input": [CALL, {"type": "function_call_output", "call_id": "call_1", "output": [FILE]}]},
            "input.1.role", "in user messages",
        ),
        ({"text": {"format": SCHEMA}}, "text.format.schema", "not"),
        ({"text": {"format": FORM}, "response_format": {"type": "json_object"}}, "text.format.schema", "one field"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", ""),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
        ({"input": [{**CALL, "arguments": "{"}]}, "input.0.arguments", "property name"),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, "input.0.content.0.type", "required"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", ""),
        ({"max_output_tokens": 3, "max_tokens": 4}, "max_output_tokens", "not both"),
        ({"messages": []}, "messages", "Unknown field"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_video", "input_video": {}}]}]},
            "input.0.content.0.input_video", "exactly one of data and url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_video"}]}]},
            "input.0.content.0", "exactly one of input_video and video_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input.0.content.0", "exactly one of file_id, file_data and file_url",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "https://a.example/b"}, TEXT]}]},
            "video_url", "(VIDSPEC_VIDEO_URL_HOSTS)",
        ),
        ({"input": [CALL, {"role": "user", "content": "Go."}]}, "input", "tool calls"),
    ],
)  # fmt: skip
async def test_what_is_not_done_here_is_a_400_that_says_so(
    tmp_path: Path, fields: dict[str, Any], param: str, words: str
) -> None:
    world = World(tmp_path)
    response = await respond(world, **fields)
    world.assert_refused(response, param, words)
