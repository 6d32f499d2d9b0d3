"""/v1/completions: the text reaches the model unchanged, and its continuation comes back in OpenAI's older shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.world import World
from vidspec_models.request import Turn

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


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"num_frames": 4}, "num_frames", "no videos here"),
        ({"prompt": None}, "prompt", ""),
        ({"prompt": ""}, "prompt", ""),
        ({"prompt": []}, "prompt", "list of one"),
        ({"prompt": ["a", "b"]}, "prompt", "several requests"),
        ({"prompt": [["a"]]}, "prompt", "valid string"),
        ({"prompt": [7]}, "prompt", "valid string"),
        ({"prompt": [""]}, "prompt", ""),
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


async def test_a_prompt_may_come_in_a_list_of_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert (await world.client.post(URL, json={"prompt": [" Once upon"]})).status_code == 200
    assert world.engine.requests[0].turns == (Turn(role="user", parts=(" Once upon",)),)


async def test_a_field_that_is_null_is_not_given_here_either(tmp_path: Path) -> None:
    body = {"prompt": "There are", "end_s": None, "num_frames": None, "logprobs": None}
    assert (await World(tmp_path).client.post("/v1/completions", json=body)).status_code == 200
