"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.api.chat import ASK, VIDEO, user
from tests.api.world import PATIENCE_S, World
from tests.fakes import FakeEngine
from vidspec_models.request import ChatTemplate

pytestmark = [pytest.mark.api, pytest.mark.anyio]


async def test_a_text_is_counted_and_read_back(tmp_path: Path) -> None:
    client = World(tmp_path).client
    told = await client.post("/tokenize", json={"model": "fake-alias", "prompt": "moves"})
    assert told.json() == {"count": 1, "max_model_len": 1024, "tokens": [1], "token_strs": None}
    told = await client.post("/tokenize", json={"prompt": "moves", "return_token_strs": True})
    assert told.json()["token_strs"] == ["moves"]
    assert (await client.post("/detokenize", json={"tokens": [0, 1]})).json() == {"prompt": "what moves"}


class EngineWithBos(FakeEngine):
    """Its tokenizer begins a text with a special token, as Llama's does."""

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = super().tokenizer
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
        return tokenizer


@pytest.mark.parametrize(("given", "tokens"), [({}, [3, 1]), ({"add_special_tokens": False}, [1])])
async def test_special_tokens_count_unless_they_are_not_wanted(
    tmp_path: Path, given: dict[str, bool], tokens: list[int]
) -> None:
    told = await World(tmp_path, EngineWithBos()).client.post("/tokenize", json={"prompt": "moves", **given})
    assert told.json()["tokens"] == tokens


async def test_special_tokens_are_read_back(tmp_path: Path) -> None:
    told = await World(tmp_path, EngineWithBos()).client.post("/detokenize", json={"tokens": [3, 1]})
    assert told.json() == {"prompt": "<s> moves"}


async def test_a_conversation_is_counted_by_the_worker_that_would_answer_it(tmp_path: Path) -> None:
    world = World(tmp_path, keys=["a-key-0123456789abcdef"])
    world.client.headers["authorization"] = "Bearer a-key-0123456789abcdef"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What moves?"}]
    told = await world.client.post("/tokenize", json={"messages": turns, "add_generation_prompt": False})
    assert told.json() == {"count": 40, "max_model_len": 1024, "tokens": None, "token_strs": None}
    (asked,) = world.engine.requests
    assert [turn.text for turn in asked.turns] == ["Be brief.", "What moves?"]
    assert asked.template == ChatTemplate(add_generation_prompt=False)
    assert asked.caller, "or it would take turns with those of all other keys"
    assert world.engine.cancelled == [asked.request_id]


async def test_a_responses_input_is_counted_as_it_would_be_asked(tmp_path: Path) -> None:
    world = World(tmp_path)
    body = {"model": "fake-target", "input": "What moves?", "instructions": "Be brief."}
    counted = await world.client.post("/v1/responses/input_tokens", json=body)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": 40}
    assert (await world.client.post("/v1/responses", json=body)).json()["usage"]["input_tokens"] == 40
    counted_as, asked = world.engine.requests
    assert (counted_as.turns, counted_as.template) == (asked.turns, asked.template)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"messages": [user(ASK)]}), ("/v1/responses/input_tokens", {"input": "What moves?"})],
)
async def test_a_count_that_takes_too_long_is_given_up(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    world = World(tmp_path, FakeEngine(asyncio.Event()), request_timeout_s=0.05)
    async with asyncio.timeout(PATIENCE_S):
        assert (await world.client.post(path, json=body)).status_code == 504
    assert len(world.engine.cancelled) == 1


USUAL = {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "moves", "add_special_tokens": True, **USUAL},
        {"prompt": "moves", **dict.fromkeys(["add_special_tokens", *USUAL])},
        {"messages": [user(ASK)], "add_special_tokens": False, "return_token_strs": False, **USUAL},
    ],
)
async def test_what_clients_send_as_usual_passes(tmp_path: Path, body: dict[str, Any]) -> None:
    response = await World(tmp_path).client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/responses/input_tokens", {"input": [user(VIDEO, {"type": "input_text", "text": "x"})]}, 400, "input"),
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x" * 200_001}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [user(ASK)], "prompt": "x"}, 400, "prompt"),
        ("/tokenize", {"messages": [user(VIDEO, ASK)]}, 400, "messages"),
        ("/tokenize", {"messages": [{**user(ASK), "role": "assistant"}]}, 400, "messages.0.role"),
        ("/tokenize", {"messages": [user(ASK)], "return_token_strs": True}, 400, "return_token_strs"),
        ("/tokenize", {"messages": [user(ASK)], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "continue_final_message": True}, 400, "continue_final_message"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"add_vision_id": False}}, 400, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [2**31]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1] * 65_537}, 400, "tokens"),
    ],
)
async def test_a_bad_body_is_refused(tmp_path: Path, path: str, body: dict[str, Any], status: int, param: str) -> None:
    response = await World(tmp_path).client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_nothing_is_read_before_the_model_is_loaded_or_while_all_places_are_taken(tmp_path: Path) -> None:
    body = {"prompt": "moves"}
    assert (await World(tmp_path, FakeEngine(is_ready=False)).client.post("/tokenize", json=body)).status_code == 503
    world = World(tmp_path, max_running_requests=1, max_queued_requests=0)
    with world.admission.permit("", ""):
        assert (await world.client.post("/tokenize", json=body)).status_code == 503
    assert (await world.client.post("/tokenize", json=body)).status_code == 200
