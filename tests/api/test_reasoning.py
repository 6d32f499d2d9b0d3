"""What a model thinks is told apart from what it says, in every API; and can be sent back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseReasoningItem

from tests.api.chat import ask
from tests.api.test_responses import events, respond
from tests.api.world import World
from tests.fakes import FINISHED, INFO, PROMPT_READY, FakeEngine, token_deltas
from vidspec_models.request import Reasoning, ToolFormat, Turn
from vidspec_service.engine.types import FinishReason, Logprob, TextDelta, TokenLogprob

pytestmark = [pytest.mark.api, pytest.mark.anyio]

THOUGHT = ("It ", "is red.\n</thi", "nk>\n\n", "Red", ".")
BOTH = {"reasoning": "It is red.", "reasoning_content": "It is red."}


def engine(*texts: str, reason: FinishReason = FinishReason.STOP) -> FakeEngine:
    deltas = [TextDelta(text=text, num_tokens=1) for text in texts or THOUGHT]
    finished = replace(FINISHED, finish_reason=reason, reasoning_tokens=3)
    made = FakeEngine(replace(PROMPT_READY, reasoning=Reasoning.OPEN), *deltas, finished)
    made.known = replace(INFO, tool_format=ToolFormat.HERMES)
    return made


def deltas(text: str) -> list[dict[str, Any]]:
    told = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [choice["delta"] for each in told for choice in each["choices"]]


async def test_a_chat_completion_has_it_under_both_names(tmp_path: Path) -> None:
    world = World(tmp_path, engine())
    answer = (await ask(world)).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Red.", "refusal": None, **BOTH}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    streamed = deltas((await ask(world, stream=True)).text)
    thoughts = [each for each in streamed if "reasoning" in each]
    assert thoughts == [dict.fromkeys(BOTH, piece) for piece in ("It ", "is red.")]
    assert "".join(each.get("content", "") for each in streamed) == "Red."


async def test_our_own_route_has_it_once(tmp_path: Path) -> None:
    world = World(tmp_path, engine())
    message = (await world.ask()).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Red.", "reasoning": "It is red."}
    assert "".join(each.get("reasoning", "") for each in deltas((await world.ask(stream=True)).text)) == "It is red."


async def test_a_client_that_does_not_want_it_does_not_get_it(tmp_path: Path) -> None:
    world = World(tmp_path, engine())
    assert "It is" not in (await ask(world, include_reasoning=False)).text
    assert "It is" not in (await ask(world, include_reasoning=False, stream=True)).text
    (message,) = (await respond(world, include_reasoning=False)).json()["output"]
    assert message["content"][0]["text"] == "Red."


async def test_a_completion_is_the_models_text(tmp_path: Path) -> None:
    made = engine("<think>\n", *THOUGHT)
    made.script = (PROMPT_READY, *made.script[1:])  # what a worker says of a prompt without a template
    response = await World(tmp_path, made).client.post("/v1/completions", json={"prompt": "?"})
    assert response.json()["choices"][0]["text"] == "<think>\nIt is red.\n</think>\n\nRed."


async def test_a_response_has_an_item_for_it(tmp_path: Path) -> None:
    world = World(tmp_path, engine())
    answer = (await respond(world)).json()
    thought, message = answer["output"]
    ResponseReasoningItem.model_validate(thought)
    assert thought.pop("id").startswith("rs_")
    assert thought == {
        "type": "reasoning", "status": "completed", "summary": [],
        "content": [{"type": "reasoning_text", "text": "It is red."}],
    }  # fmt: skip
    assert message["content"][0]["text"] == "Red."
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


async def test_the_events_of_a_response_tell_it_before_the_message(tmp_path: Path) -> None:
    told = events((await respond(World(tmp_path, engine()), stream=True)).text)
    thinking = [each for each in told if each.get("output_index") == 0]
    assert [each["type"].removeprefix("response.") for each in thinking] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip
    assert thinking[-3]["text"] == "It is red."
    assert [each["delta"] for each in told if each["type"] == "response.output_text.delta"] == ["Red", "."]
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["reasoning", "message"]


@pytest.mark.parametrize(
    ("texts", "told"),
    [(("\n", "Red", "."), ["\n", "Red", "."]), (("<think>", "red", "</think>", "Red"), ["Red"])],
)
async def test_what_may_become_reasoning_and_does_not_keeps_its_log_probabilities(
    tmp_path: Path, texts: tuple[str, ...], told: list[str]
) -> None:
    deltas = token_deltas(*texts)
    world = World(tmp_path, FakeEngine(replace(PROMPT_READY, reasoning=Reasoning.TAGGED), *deltas, FINISHED))
    answer = (await respond(world, include=["message.output_text.logprobs"])).json()
    assert [each["token"] for each in answer["output"][-1]["content"][0]["logprobs"]] == told


async def test_what_is_said_of_a_token_is_said_once_where_it_ends_the_reasoning(tmp_path: Path) -> None:
    token = TokenLogprob(offset=0, token=Logprob(b"", -1.0), top=())
    piece = TextDelta(text="is red.</think>Red.", num_tokens=1, logprobs=(token,))
    world = World(tmp_path, FakeEngine(replace(PROMPT_READY, reasoning=Reasoning.OPEN), piece, FINISHED))
    told = (await ask(world, stream=True, logprobs=True)).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in told if line.startswith("data: {")]
    assert [("reasoning" in each["delta"], each["logprobs"] is not None) for each in choices[1:-1]] == [
        (True, True), (False, False),
    ]  # fmt: skip


async def test_an_answer_cut_in_its_reasoning_says_so(tmp_path: Path) -> None:
    world = World(tmp_path, engine("It ", "is", reason=FinishReason.LENGTH))
    (choice,) = (await ask(world)).json()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("", "It is")
    assert choice["finish_reason"] == "length"
    (thought,) = (await respond(world)).json()["output"]
    assert (thought["type"], thought["status"]) == ("reasoning", "incomplete")
    behind = (await respond(World(tmp_path, engine("It is.", "</think>", reason=FinishReason.LENGTH)))).json()
    assert (behind["status"], [item["status"] for item in behind["output"]]) == ("incomplete", ["completed"])


async def test_an_answer_that_only_thinks_has_an_empty_message(tmp_path: Path) -> None:
    world = World(tmp_path, engine("It is.", "</think>"))
    _, message = (await respond(world)).json()["output"]
    assert message["content"][0]["text"] == ""


@pytest.mark.parametrize("name", BOTH)
async def test_it_can_be_sent_back(tmp_path: Path, name: str) -> None:
    world = World(tmp_path, engine())
    asked, again = {"role": "user", "content": "?"}, {"role": "user", "content": "Sure?"}
    said = {"role": "assistant", "content": "Red.", name: "It is red."}
    assert (await ask(world, messages=[asked, said, again])).is_success
    output = (await respond(world)).json()["output"]
    dumped = ResponseReasoningItem.model_validate(output[0]).model_dump(mode="json")
    assert (await respond(world, input=[asked, dumped, output[1], again])).is_success
    first, _, second = world.engine.requests
    turn = Turn(role="assistant", parts=("Red.",), reasoning="It is red.")
    assert first.turns[1] == second.turns[1] == turn


async def test_what_it_thought_before_a_call_belongs_to_the_turn_of_the_call(tmp_path: Path) -> None:
    world = World(tmp_path, engine())
    call = {"type": "function_call", "call_id": "call_1", "name": "go", "arguments": "{}"}
    done = {"type": "function_call_output", "call_id": "call_1", "output": "Arrived."}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Go on."}]}
    items = [{"role": "user", "content": "Go."}, thought, call, done, thought, call, {**done, "output": "x"}]
    assert (await respond(world, input=items)).is_success
    (request,) = world.engine.requests
    assert [(turn.role, turn.reasoning, len(turn.tool_calls)) for turn in request.turns] == [
        ("user", "", 0), ("assistant", "Go on.", 1), ("tool", "", 0), ("assistant", "Go on.", 1), ("tool", "", 0),
    ]  # fmt: skip


async def test_items_of_reasoning_in_a_row_are_one_turns_reasoning(tmp_path: Path) -> None:
    world = World(tmp_path, engine())
    thoughts: list[dict[str, Any]] = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text} for text in texts]}
        for texts in (("It",), ("is", "so"))
    ]
    said = [{"role": "assistant", "content": text} for text in ("", "Red.")]
    items = [{"role": "user", "content": "?"}, *thoughts, said[1], {"role": "user", "content": "Sure?"}]
    assert (await respond(world, input=items)).is_success
    assert (await respond(world, input=[items[0], said[0], thoughts[0], said[1], items[-1]])).is_success
    together, after_an_empty_message = (request.turns[1] for request in world.engine.requests)
    assert together == Turn(role="assistant", parts=("Red.",), reasoning="It\nis\nso")
    assert after_an_empty_message == Turn(role="assistant", parts=("Red.",), reasoning="It")


async def test_reasoning_that_only_another_server_can_read_is_left_out(tmp_path: Path) -> None:
    world = World(tmp_path, engine())
    sealed: dict[str, Any] = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "encrypted_content": "gAAAA",
        "status": None,
    }
    asked, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": "Red."}
    assert (await respond(world, input=[asked, sealed, said, asked])).is_success
    assert world.engine.requests[0].turns[1:-1] == (Turn(role="assistant", parts=("Red.",)),)


async def test_only_an_assistant_thinks(tmp_path: Path) -> None:
    world = World(tmp_path, engine())
    response = await ask(world, messages=[{"role": "user", "content": "?", "reasoning": "x"}])
    world.assert_refused(response, "messages.0.reasoning", "Only assistant messages")
