"""/v1/completions: the text reaches the model unchanged, and its continuation comes back in OpenAI's older shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_stream import events_of
from tests.api.uploads import ALICE
from tests.api.world import World, until
from tests.fakes import FINISHED, PROMPT_READY, FakeEngine, Step
from vidspec_models.request import GenerationRequest, Turn
from vidspec_service.api.limits.admission import ANYONE
from vidspec_service.engine.types import FinishReason, GenerationEvent, TextDelta
from vidspec_service.errors import ContextLengthExceeded

pytestmark = [pytest.mark.api, pytest.mark.anyio]

URL = "/v1/completions"


async def test_a_whole_answer_has_openais_shape(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = await world.client.post(URL, json={"model": "fake-target", "prompt": " Once upon", "max_tokens": 9})
    answer = response.json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("usage")["total_tokens"] == 45
    assert answer == {
        "object": "text_completion", "model": "fake-target",
        "choices": [{"index": 0, "text": "A red squäre.", "logprobs": None, "finish_reason": "stop"}],
    }  # fmt: skip
    (request,) = world.engine.requests
    assert (request.turns, request.template) == ((Turn(role="user", parts=(" Once upon",)),), None)
    assert (request.max_tokens, request.videos) == (9, ())


async def test_a_stream_begins_with_text_and_ends_with_the_usage_if_wanted(tmp_path: Path) -> None:
    body = {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}, "add_special_tokens": True}
    text = (await World(tmp_path).client.post(URL, json=body)).text
    *events, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert done == "[DONE]"
    *chunks, last = [json.loads(event) for event in events]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["A red", " squäre.", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
    text = (await World(tmp_path).client.post(URL, json={"prompt": "Once", "stream": True})).text
    *events, _ = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert [(len(event["choices"]), "usage" in event) for event in map(json.loads, events)] == [(1, False)] * 3


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        *(({name: 4}, name, "no videos here") for name in ("fps", "num_frames", "max_frames", "start_s", "end_s")),
        ({"prompt": None}, "prompt", ""),
        ({"prompt": ""}, "prompt.0", "at least 1 character"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": "x" * 200_001}, "prompt.0", "200000"),
        ({"prompt": [["a"]]}, "prompt.0", "valid integer"),
        ({"prompt": [7, "a"]}, "prompt.0.1", "valid integer"),
        ({"prompt": [True]}, "prompt.0", "valid integer"),
        ({"prompt": [1.5]}, "prompt.0", "valid integer"),
        ({"prompt": ["a", 7]}, "prompt.1", "valid array"),
        ({"prompt": [[]]}, "prompt.0", "at least 1 item"),
        ({"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
        ({"prompt": ["a", ""]}, "prompt.1", "at least 1 character"),
        ({"suffix": "x"}, "suffix", "at the end only"),
        ({"echo": True}, "echo", "does not repeat"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"top_logprobs": 1}, "top_logprobs", "here logprobs is the number"),
        ({"add_special_tokens": False}, "add_special_tokens", "before every text"),
        ({"messages": []}, "messages", "Unknown field"),
        ({"model": "gpt-4o"}, "model", "fake-target"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
    ],
)
async def test_what_is_not_done_here_is_told(tmp_path: Path, fields: dict[str, Any], param: str, words: str) -> None:
    response = await World(tmp_path).client.post(URL, json={"prompt": "Once", **fields})
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


async def test_a_prompt_may_be_token_ids(tmp_path: Path) -> None:
    world = World(tmp_path)
    for prompt in ([7, 8], [[7, 8]], [[7, 8], "Once", [9]]):
        assert (await world.client.post(URL, json={"prompt": prompt})).status_code == 200
    told = [(turn.parts, turn.token_ids) for request in world.engine.requests for turn in request.turns]
    assert told == [*[((), (7, 8))] * 3, (("Once",), ()), ((), (9,))]


class PlayedByPrompt(FakeEngine):
    """Plays a script of its own for each prompt."""

    def __init__(self, **scripts: tuple[Step, ...]) -> None:
        super().__init__()
        self.scripts = scripts

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.script = self.scripts[request.turns[0].text]
        return super().generate(request)


def said(*texts: str, reason: FinishReason = FinishReason.STOP) -> tuple[Step, ...]:
    """Answers to one prompt, of a token each."""
    ended = replace(FINISHED, completion_tokens=1, finish_reason=reason)
    told = [TextDelta(text=text, num_tokens=1, choice=choice) for choice, text in enumerate(texts)]
    return (PROMPT_READY, *told, *(replace(ended, choice=choice) for choice in range(len(texts))))


async def test_each_prompt_has_its_answers_in_its_places(tmp_path: Path) -> None:
    """vLLM's order: answer j to prompt i has the index n * i + j."""
    world = World(tmp_path, PlayedByPrompt(one=said("A", "B"), two=said("C", "D", reason=FinishReason.LENGTH)))
    body = {"prompt": ["one", "two"], "n": 2, "seed": 2**64 - 1}
    answer = (await world.client.post(URL, json=body)).json()
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        (0, "A", "stop"), (1, "B", "stop"), (2, "C", "length"), (3, "D", "length"),
    ]  # fmt: skip
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (80, 4, 84)
    first, second = world.engine.requests
    assert (first.sampling.seed, second.sampling.seed) == (2**64 - 1, 1), "answer k has the seed of the first plus k"
    assert first.request_id == answer["id"] != second.request_id
    assert world.metric("request_generation_tokens_count") == 4
    assert world.metric("request_success_total", finished_reason="length") == 1
    assert world.metric("generation_tokens_total") == 4

    text = (await world.client.post(URL, json={**body, "stream": True})).text
    choices = [choice for event in events_of(text)[:-1] for choice in event["choices"]]
    assert {choice["index"]: choice["text"] for choice in choices if choice["text"]} == dict(enumerate("ABCD"))
    ends = sorted((choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"])
    assert ends == [(0, "stop"), (1, "stop"), (2, "length"), (3, "length")]


async def test_a_prompts_end_is_counted_after_its_tokens(tmp_path: Path) -> None:
    """All events of a prompt may have come before the first one is read."""
    tokens = [TextDelta(text="A", num_tokens=1)] * 3
    world = World(tmp_path, FakeEngine(PROMPT_READY, *tokens, FINISHED))
    assert (await world.client.post(URL, json={"prompt": ["x", "y"]})).status_code == 200
    assert world.metric("request_time_per_output_token_seconds_count") == 2


async def test_more_prompts_than_are_answered_at_a_time_wait_for_their_turn(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(
        tmp_path, FakeEngine(PROMPT_READY, gate, *said("A")[1:]), max_running_requests=2, max_queued_requests=8
    )
    asking = asyncio.create_task(world.client.post(URL, json={"prompt": ["x"] * 7}))
    num_slots = 2 + world.settings.decode_workers
    await until(lambda: world.engine.num_running == num_slots)
    assert (world.admission.num_admitted, world.admission.num_outside_engine) == (7, 7 - num_slots)
    gate.set()
    assert [choice["text"] for choice in (await asking).json()["choices"]] == ["A"] * 7
    assert world.admission.num_admitted == 0


async def test_another_request_does_not_wait_until_all_prompts_of_one_are_answered(tmp_path: Path) -> None:
    gates = [asyncio.Event() for _ in range(7)]
    scripts = {str(number): (PROMPT_READY, gate, *said("A")[1:]) for number, gate in enumerate(gates)}
    world = World(tmp_path, PlayedByPrompt(other=said("B"), **scripts), max_running_requests=2, decode_workers=1)
    asking = asyncio.create_task(world.client.post(URL, json={"prompt": list(scripts)}))
    await until(lambda: world.engine.num_running == 3)
    other = asyncio.create_task(world.client.post(URL, json={"prompt": "other"}))
    await until(lambda: len(world.services.queue._waiting.get(ANYONE, ())) >= 2)
    gates[0].set()
    gates[3].set()  # this one waited before the other request came
    assert (await other).json()["choices"][0]["text"] == "B"
    for gate in gates:
        gate.set()
    assert [choice["text"] for choice in (await asking).json()["choices"]] == ["A"] * 7


async def test_all_prompts_are_cancelled_when_one_fails_or_the_client_leaves(tmp_path: Path) -> None:
    never = asyncio.Event()
    too_long = ContextLengthExceeded("the prompt has 9,999 tokens")
    world = World(tmp_path, PlayedByPrompt(good=(PROMPT_READY, never), bad=(too_long,)))
    refused = await world.client.post(URL, json={"prompt": ["good", "bad", "good"]})
    assert (refused.status_code, "9,999" in refused.text) == (400, True)
    asking = asyncio.create_task(world.client.post(URL, json={"prompt": ["good"] * 3}))
    await until(lambda: world.engine.num_running == 3)
    asking.cancel()
    await until(lambda: world.engine.num_running == world.admission.num_admitted == 0)
    assert (await world.client.post(URL, json={"prompt": "bad"})).status_code == 400, "the slots are free again"


@pytest.mark.parametrize(
    ("settings", "most", "name"),
    [
        ({"max_running_requests": 2, "max_queued_requests": 6, "keys": [ALICE]}, 8, "VIDSPEC_MAX_QUEUED_REQUESTS"),
        ({"max_running_requests": 2, "max_queued_requests": 6}, 6, "VIDSPEC_MAX_QUEUED_REQUESTS"),
        ({"max_running_requests": 4, "max_queued_requests": 0}, 4, "VIDSPEC_MAX_QUEUED_REQUESTS"),
        ({"max_requests_per_key": 4}, 4, "VIDSPEC_MAX_REQUESTS_PER_KEY"),
    ],
)
async def test_a_request_may_have_as_many_prompts_as_it_would_get_places(
    tmp_path: Path, settings: dict[str, Any], most: int, name: str
) -> None:
    world = World(tmp_path, FakeEngine(*said("A", "B")), **settings)
    headers = {"authorization": f"Bearer {ALICE}"}
    fits = await world.client.post(URL, json={"prompt": ["x"] * (most // 2), "n": 2}, headers=headers)
    assert fits.status_code == 200, fits.text
    refused = await world.client.post(URL, json={"prompt": ["x"] * (most // 2 + 1), "n": 2}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert f"the limit of a request is {most} ({name})" in refused.json()["error"]["message"]


async def test_a_prompt_may_come_in_a_list_of_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert (await world.client.post(URL, json={"prompt": [" Once upon"]})).status_code == 200
    assert world.engine.requests[0].turns == (Turn(role="user", parts=(" Once upon",)),)


async def test_a_field_that_is_null_is_not_given_here_either(tmp_path: Path) -> None:
    body = {"prompt": "There are", "end_s": None, "num_frames": None, "logprobs": None}
    assert (await World(tmp_path).client.post("/v1/completions", json=body)).status_code == 200
