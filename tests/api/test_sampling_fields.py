"""Penalties, bans and log probabilities on the wire: the same fields in both dialects, as JSON and as a form."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.chat import ask
from tests.api.test_responses import events
from tests.api.test_stream import events_of
from tests.api.world import World
from tests.fakes import ANSWER, FINISHED, INFO, PROMPT_READY, FakeEngine, token_deltas
from vidspec_models.request import GenerationRequest, Reasoning, SamplingParams, ToolFormat
from vidspec_service.engine.types import Logprob, TextDelta, TokenLogprob

pytestmark = [pytest.mark.api, pytest.mark.anyio]

FIELDS: dict[str, Any] = {
    "max_tokens": 9, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2,
    "logit_bias": {"5": -100, "70": 2.5}, "bad_words": ["red", " blue "], "min_tokens": 3, "ignore_eos": True,
    "stop_token_ids": [7, 8], "logprobs": True, "top_logprobs": 2,
}  # fmt: skip
LAW = SamplingParams(
    min_p=0.1, presence_penalty=0.5, frequency_penalty=-1.0, repetition_penalty=1.2, seed=3,
    logit_bias=((5, -100.0), (70, 2.5)), bad_words=("red", " blue "),
)  # fmt: skip
SENT = GenerationRequest(
    request_id="",
    turns=(),
    sampling=LAW,
    max_tokens=9,
    min_tokens=3,
    ignore_eos=True,
    stop_token_ids=(7, 8),
    logprobs=2,
)


def asked_of(world: World) -> GenerationRequest:
    request = world.engine.requests[-1]
    return replace(
        request, request_id="", turns=(), videos=(), speculation=SENT.speculation, compression=SENT.compression
    )  # fmt: skip


async def test_every_field_reaches_the_engine_in_either_dialect_and_format(tmp_path: Path) -> None:
    world = World(tmp_path)
    form = {name: str(value).lower() if isinstance(value, bool) else value for name, value in FIELDS.items()}
    form |= {"logit_bias": json.dumps(FIELDS["logit_bias"]), "stop_token_ids": ["7", "8"]}
    for response in (
        await world.ask(**FIELDS, seed=3),
        await world.ask_form(**form, seed="3"),
        await ask(world, **FIELDS, seed=3),
    ):
        assert response.status_code == 200, response.text
        assert asked_of(world) == SENT


async def test_null_and_neutral_values_ask_for_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    neutral = {
        "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
        "bad_words": [], "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "logprobs": False,
        "top_logprobs": 0,
    }  # fmt: skip
    plain = GenerationRequest(request_id="", turns=(), sampling=SamplingParams(seed=3))
    for fields in (neutral, dict.fromkeys(neutral), {}):
        assert (await ask(world, **fields, seed=3)).status_code == 200
        assert asked_of(world) == plain


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"min_tokens": 65}, 400), ({"min_tokens": 64}, 200), ({"min_tokens": 65, "max_tokens": 66}, 200)],
)
async def test_where_nothing_is_said_an_answer_has_no_more_tokens_than_the_server_gives_it(
    tmp_path: Path, fields: dict[str, Any], status: int
) -> None:
    world = World(tmp_path)
    text = await world.client.post("/v1/completions", json={"prompt": "Once", **fields})
    for response in (*await both(world, **fields), text):
        assert response.status_code == status
        assert status == 200 or "an answer has at most 64 tokens" in response.json()["error"]["message"]


HALF = TokenLogprob(offset=0, token=Logprob(b"\xc3", -0.5), top=(Logprob(b"\xc3", -0.5), Logprob(b" A", -2.0)))
HALVES = ("ä".encode()[:1], "ä".encode()[1:])
WHOLE = TokenLogprob(offset=0, token=Logprob(b"\xa4", -0.25), top=())
SCRIPT = (
    ANSWER[0],
    TextDelta(text="", num_tokens=1, ids=(1,), logprobs=(HALF,)),
    TextDelta(text="ä", num_tokens=1, ids=(2,), logprobs=(WHOLE,)),
    ANSWER[-1],
)
TOLD = [
    {
        "token": "�", "logprob": -0.5, "bytes": [0xC3],
        "top_logprobs": [
            {"token": "�", "logprob": -0.5, "bytes": [0xC3]},
            {"token": " A", "logprob": -2.0, "bytes": [32, 65]},
        ],
    },
    {"token": "�", "logprob": -0.25, "bytes": [0xA4], "top_logprobs": []},
]  # fmt: skip


async def both(world: World, **fields: Any) -> list[httpx.Response]:
    return [await world.ask(**fields), await ask(world, **fields)]


async def test_log_probabilities_are_told_in_openais_shape_in_both_dialects(tmp_path: Path) -> None:
    for response in await both(World(tmp_path, FakeEngine(*SCRIPT)), logprobs=True, top_logprobs=2):
        (choice,) = response.json()["choices"]
        assert choice["message"]["content"] == "ä"
        assert choice["logprobs"] == {"content": TOLD, "refusal": None}


async def test_log_probabilities_alone_ask_for_no_other_tokens(tmp_path: Path) -> None:
    world = World(tmp_path)
    await both(world, logprobs=True)
    assert [asked.logprobs for asked in world.engine.requests] == [0, 0]


async def test_a_stream_tells_each_tokens_with_the_chunk_that_it_is_in(tmp_path: Path) -> None:
    for response in await both(World(tmp_path, FakeEngine(*SCRIPT)), logprobs=True, top_logprobs=2, stream=True):
        choices = [choice for event in events_of(response.text)[:-1] for choice in event["choices"]]
        told = [(choice["delta"].get("content"), choice.get("logprobs")) for choice in choices]
        assert told == [
            ("", None),
            ("", {"content": TOLD[:1], "refusal": None}),
            ("ä", {"content": TOLD[1:], "refusal": None}),
            (None, None),
        ]


@pytest.mark.parametrize("asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
async def test_a_response_tells_them_beside_its_text(tmp_path: Path, asked: dict[str, Any]) -> None:
    """In a stream, text that is held back passes them on to the next text; the end tells all of them again."""
    end = TextDelta(text="", num_tokens=1, ids=(3,), logprobs=(WHOLE,))
    world = World(tmp_path, FakeEngine(*SCRIPT[:-1], end, SCRIPT[-1]))
    body = {"input": "What moves?", **asked}
    told = [*TOLD, TOLD[1]]
    (message,) = (await world.client.post("/v1/responses", json=body)).json()["output"]
    assert message["content"] == [{"type": "output_text", "text": "ä", "annotations": [], "logprobs": told}]
    turns = [{"role": "user", "content": "What?"}, message, {"role": "user", "content": "And?"}]
    assert (await world.client.post("/v1/responses", json={"input": turns})).status_code == 200
    text = (await world.client.post("/v1/responses", json={**body, "stream": True})).text
    found = {event["type"]: event for event in events(text)}
    deltas = [event["logprobs"] for event in events(text) if event["type"] == "response.output_text.delta"]
    assert found["response.content_part.added"]["part"] == {"type": "output_text", "text": "", "annotations": []}
    assert deltas == [TOLD, TOLD[1:]], "the end token adds no text, and has a delta of its own"
    assert found["response.output_text.done"]["logprobs"] == told
    assert found["response.completed"]["response"]["output"][0]["content"] == message["content"]
    much = asked.get("top_logprobs", 0)
    assert [each.logprobs for each in world.engine.requests] == [much, None, much]


async def test_a_response_tells_them_of_its_text_and_not_of_its_calls(tmp_path: Path) -> None:
    said = ("I go.", "<tool", '_call>\n{"name": "go", "arguments": {}}\n</tool_call>')
    engine = FakeEngine(ANSWER[0], *token_deltas(*said), ANSWER[-1])
    engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    body = {"input": "Go.", "tools": [{"type": "function", "name": "go"}], "top_logprobs": 1}
    world = World(tmp_path, engine)
    whole = (await world.client.post("/v1/responses", json=body)).json()["output"]
    streamed = events((await world.client.post("/v1/responses", json={**body, "stream": True})).text)
    for message, call in (whole, streamed[-1]["response"]["output"]):
        assert [token["token"] for token in message["content"][0]["logprobs"]] == ["I go."]
        assert (call["name"], call["arguments"], call.get("logprobs")) == ("go", "{}", None)


@pytest.mark.parametrize("num_at_a_time", [1, 3, 9])
async def test_a_response_tells_the_same_of_its_text_however_many_tokens_come_at_a_time(
    tmp_path: Path, num_at_a_time: int
) -> None:
    call = ("<tool_call>", "\n", '{"name": "go", "arguments": {}}', "\n</tool_call>")
    deltas = token_deltas("It", "\n", "</think>", *HALVES, "re.", *call)
    pieces = [TextDelta.joined(deltas[at : at + num_at_a_time]) for at in range(0, len(deltas), num_at_a_time)]
    engine = FakeEngine(replace(PROMPT_READY, reasoning=Reasoning.OPEN), *pieces, FINISHED)
    engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    body = {"input": "Go.", "tools": [{"type": "function", "name": "go"}], "top_logprobs": 1}
    world = World(tmp_path, engine)
    whole = (await world.client.post("/v1/responses", json=body)).json()["output"]
    streamed = events((await world.client.post("/v1/responses", json={**body, "stream": True})).text)
    for thought, message, called in (whole, streamed[-1]["response"]["output"]):
        assert (thought["content"][0]["text"], called["arguments"]) == ("It", "{}")
        assert message["content"][0]["text"] == "äre."
        assert [token["logprob"] for token in message["content"][0]["logprobs"]] == [-3.0, -4.0, -5.0]


async def test_a_response_tells_them_of_text_that_was_held_back_to_its_end(tmp_path: Path) -> None:
    """It might have become a stop string."""
    first, second = token_deltas("A ", "red")
    deltas = (first, replace(second, text=""))
    world = World(tmp_path, FakeEngine(PROMPT_READY, *deltas, TextDelta(text="red", num_tokens=0), FINISHED))
    body = {"input": "What?", "include": ["message.output_text.logprobs"]}
    (message,) = (await world.client.post("/v1/responses", json=body)).json()["output"]
    assert message["content"][0]["text"] == "A red"
    assert [token["token"] for token in message["content"][0]["logprobs"]] == ["A ", "red"]


async def test_a_response_tells_them_of_the_tokens_of_the_stop_string_too(tmp_path: Path) -> None:
    """As every API does: they are tokens of the answer, and counted."""
    first, *rest = token_deltas("A ", "re", "d")
    world = World(tmp_path, FakeEngine(PROMPT_READY, first, *(replace(each, text="") for each in rest), FINISHED))
    body = {"input": "What?", "include": ["message.output_text.logprobs"], "stop": "red"}
    (message,) = (await world.client.post("/v1/responses", json=body)).json()["output"]
    assert message["content"][0]["text"] == "A "
    assert [token["token"] for token in message["content"][0]["logprobs"]] == ["A ", "re", "d"]


async def test_a_continued_text_tells_them_in_openais_older_shape(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*SCRIPT))
    ask_for = {"prompt": "Once", "logprobs": 2}
    (choice,) = (await world.client.post("/v1/completions", json=ask_for)).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["�", "�"], "token_logprobs": [-0.5, -0.25], "top_logprobs": [{"�": -0.5, " A": -2.0}, {"�": -0.25}],
        "text_offset": [0, 0],
    }  # fmt: skip
    text = (await world.client.post("/v1/completions", json={**ask_for, "stream": True})).text
    chunks = [event["choices"][0] for event in events_of(text)[:-1]]
    told = [(chunk["text"], chunk["logprobs"] and chunk["logprobs"]["token_logprobs"]) for chunk in chunks]
    assert told == [("", [-0.5]), ("ä", [-0.25]), ("", None)]
    assert (await world.client.post("/v1/completions", json={"prompt": "Once", "logprobs": False})).status_code == 200
    assert [asked.logprobs for asked in world.engine.requests] == [2, 2, None]


async def test_the_tokens_of_a_continued_text_have_their_places_in_it_in_whichever_chunk_they_come(
    tmp_path: Path,
) -> None:
    """A part of a character is at the place of the character."""
    answers = [token_deltas(" sq", *HALVES, "re", "狐", "!", choice=choice) for choice in range(2)]
    deltas = chain.from_iterable(zip(*answers, strict=True))
    world = World(tmp_path, FakeEngine(ANSWER[0], *deltas, *(replace(FINISHED, choice=choice) for choice in range(2))))
    asked = {"prompt": "Once", "logprobs": 0, "n": 2}
    choices = (await world.client.post("/v1/completions", json=asked)).json()["choices"]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 3, 3, 4, 6, 7]] * 2
    text = (await world.client.post("/v1/completions", json={**asked, "stream": True})).text
    chunks = [event["choices"][0] for event in events_of(text)[:-1]]
    places = [(chunk["index"], *chunk["logprobs"]["text_offset"]) for chunk in chunks if chunk["logprobs"]]
    assert places == [(choice, place) for place in (0, 3, 3, 4, 6, 7) for choice in range(2)]


async def test_the_likely_tokens_of_a_continued_text_have_the_token_itself_and_of_equal_texts_the_likelier(
    tmp_path: Path,
) -> None:
    """lm-eval calls a token greedy if its log probability is the largest of them."""
    halves = (Logprob(b"\xc3", -0.5), Logprob(b"\xa4", -1.0))
    drawn = TokenLogprob(offset=0, token=Logprob(b" A", -3.0), top=halves)
    said = TextDelta(text=" A", num_tokens=1, ids=(1,), logprobs=(drawn,))
    world = World(tmp_path, FakeEngine(ANSWER[0], said, ANSWER[-1]))
    (choice,) = (await world.client.post("/v1/completions", json={"prompt": "Once", "logprobs": 2})).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"�": -0.5, " A": -3.0}]
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["�", " A"], "best first"


async def test_whoever_does_not_ask_is_told_none(tmp_path: Path) -> None:
    ours, openais = await both(World(tmp_path))
    assert "logprobs" not in ours.json()["choices"][0]
    assert openais.json()["choices"][0]["logprobs"] is None
