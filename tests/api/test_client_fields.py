"""Extra fields that frameworks send: accepted where they change nothing, otherwise a 400 that says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.chat import ASK, IMAGE_URL, VIDEO, ask, user
from tests.api.world import DATA_URL, World
from tests.fakes import INFO, FakeEngine
from vidspec_models.request import ChatTemplate, ToolFormat
from vidspec_service.decoding.clip import FrameRequest

pytestmark = [pytest.mark.api, pytest.mark.anyio]

INERT: dict[str, Any] = {
    "user": "me", "metadata": {"run": "7"}, "store": False, "service_tier": "auto", "reasoning_effort": "low",
    "modalities": ["text"], "verbosity": "low", "prompt_cache_key": "k", "safety_identifier": "s",
    "parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "functions": [], "function_call": "auto",
    "logit_bias": {}, "seed": -1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "chat_template_kwargs": {},
    "mm_processor_kwargs": {}, "media_io_kwargs": {}, "add_generation_prompt": True, "continue_final_message": False,
    "echo": False, "add_special_tokens": False, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0,
    "priority": 0, "include_reasoning": True, "request_id": "r", "documents": [], "return_token_ids": False,
    "ignore_eos": False, "min_tokens": 0, "stop_token_ids": [], "bad_words": [], "prompt_cache_retention": "24h",
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": False, "return_tokens_as_token_ids": False,
    "top_logprobs": 0, "stop": None, "response_format": {"type": "text"}, "temperature": None, "top_p": None,
    "stream": None, "stream_options": None, "guided_decoding_backend": "guidance",
}  # fmt: skip


async def test_what_changes_nothing_is_taken_all_at_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert (await ask(world, **INERT)).status_code == 200
    assert (await ask(world, **dict.fromkeys(INERT))).status_code == 200
    assert (await ask(world)).status_code == 200
    first, _, plain = world.engine.requests
    assert (first.turns, first.stop, first.max_tokens) == (plain.turns, plain.stop, plain.max_tokens)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.0, 1.0, 0)
    assert first.sampling.seed >= 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"store": True}, "store", "does not store answers"),
        ({"modalities": ["text", "audio"]}, "modalities", "text only"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "never contain"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "never include"),
        ({"best_of": 3}, "best_of", "select the best"),
        ({"best_of": True}, "best_of", "select the best"),
        ({"echo": 0}, "echo", "does not repeat"),
        ({"use_beam_search": True}, "use_beam_search", "beam search"),
        ({"priority": 3}, "priority", "no priorities"),
        ({"mm_processor_kwargs": {"fps": 3}, "num_frames": 8}, "num_frames", "not both"),
        ({"media_io_kwargs": {"video": {"num_frames": 3}}, "fps": 1.0}, "fps", "not both"),
        ({"mm_processor_kwargs": {"do_sample_frames": False}}, "mm_processor_kwargs.do_sample_frames", "data:video"),
        ({"mm_processor_kwargs": {"min_pixels": 9}}, "mm_processor_kwargs.min_pixels", "Unknown field"),
        ({"add_special_tokens": True}, "add_special_tokens", "template"),
        ({"metadata": {"a": 1}}, "metadata", ""),
        ({"metadata": {str(each): "x" for each in range(17)}}, "metadata", "16"),
        ({"messages": [{**user(ASK), "name": "x" * 65}]}, "messages.0.name", "64"),
        ({"user": "x" * 513}, "user", ""),
        ({"seed": -2}, "seed", "greater than or equal to 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to 0"),
        ({"usr": "me"}, "usr", "Did you mean user?"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "Unknown field"),
    ],
)
async def test_what_would_change_the_answer_is_a_400_that_says_why(
    tmp_path: Path, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await ask(World(tmp_path), **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("processor", "media", "asked"),
    [
        ({"fps": 2, "do_sample_frames": True}, None, FrameRequest(fps=2.0)),  # as the card of Qwen3-VL has it
        ({"num_frames": 4}, None, FrameRequest(num_frames=4)),
        (None, {"video": {"num_frames": 40, "fps": -1}}, FrameRequest(num_frames=40)),
        (None, {"video": {"num_frames": -1}}, FrameRequest()),
        ({"num_frames": 9}, {"video": {"num_frames": 12}}, FrameRequest(num_frames=9)),
        ({"fps": 2}, {"video": {"num_frames": 32}}, FrameRequest(fps=2.0, max_frames=32)),
        ({"fps": 2, "num_frames": 9}, {"video": {"fps": 1, "num_frames": 12}}, FrameRequest(fps=1.0, max_frames=9)),
        ({}, {}, FrameRequest()),
    ],
)
async def test_vllms_ways_to_choose_frames_choose_them(
    tmp_path: Path, processor: Any, media: Any, asked: FrameRequest
) -> None:
    world = World(tmp_path)
    fields = {"mm_processor_kwargs": processor, "media_io_kwargs": media}
    assert (await ask(world, **fields)).is_success
    body = {"input": [{"role": "user", "content": [VIDEO, {"type": "input_text", "text": "?"}]}], **fields}
    assert (await world.client.post("/v1/responses", json=body)).is_success
    assert [replace(each, num_sharing=1) for each in world.decoder.requests] == [asked], (
        "the second finds the clip of the first"
    )
    assert (await ask(world, **fields, max_frames=5, start_s=1.0)).is_success
    most = 5 if asked.max_frames is None else min(5, asked.max_frames)
    assert replace(world.decoder.requests[-1], num_sharing=1) == replace(asked, max_frames=most, start_s=1.0)


async def test_vllms_fields_that_choose_no_frames_leave_the_choice_to_ours(tmp_path: Path) -> None:
    world = World(tmp_path)
    empty = {"mm_processor_kwargs": {"fps": -1}, "media_io_kwargs": {"video": {}}}
    assert (await ask(world, **empty, num_frames=5)).is_success
    assert world.decoder.requests == [FrameRequest(num_frames=5)]


async def test_an_answer_of_vllm_or_openai_can_be_sent_back_as_it_is(tmp_path: Path) -> None:
    answered: dict[str, Any] = {
        "role": "assistant", "content": "A red square.", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": [], "reasoning": None, "reasoning_content": None,
        "provider_specific_fields": {"refusal": None},
    }  # fmt: skip
    world = World(tmp_path)
    turns = [{**user(VIDEO, ASK), "name": "me"}, answered, user(ASK)]
    assert (await ask(world, messages=turns)).status_code == 200
    assert [turn.role for turn in world.engine.requests[0].turns] == ["user", "assistant", "user"]


async def test_a_kind_that_is_null_is_the_only_one(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine())
    world.engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    call = {"id": "call_1", "type": None, "function": {"name": "go", "arguments": "{}"}}
    turns = [user(ASK), {"role": "assistant", "tool_calls": [call]}, user(ASK)]
    assert (await ask(world, messages=turns)).status_code == 200
    said = {"type": None, "role": "user", "content": "What moves?"}
    assert (await world.client.post("/v1/responses", json={"input": [said]})).status_code == 200


async def test_the_text_part_of_an_answer_may_repeat_its_message(tmp_path: Path) -> None:
    """As OpenAI's Agents SDK for JavaScript sends it back."""
    world = World(tmp_path, FakeEngine())
    world.engine.known = replace(INFO, tool_format=ToolFormat.HERMES)
    call = {"id": "call_1", "type": "function", "function": {"name": "go", "arguments": "{}"}}
    rest: dict[str, Any] = {"role": "assistant", "reasoning": "It moves.", "tool_calls": [call]}
    part = {"type": "text", "text": "I go.", "refusal": None, "reasoning_content": "It moves.", **rest}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Arrived."}
    assert (await ask(world, messages=[user(ASK), {"content": [part], **rest}, result])).status_code == 200
    assert (await ask(world, messages=[user(ASK), {"content": "I go.", **rest}, result])).status_code == 200
    repeated, plain = world.engine.requests
    assert repeated.turns == plain.turns


async def test_what_clients_of_anthropics_models_mark_changes_nothing(tmp_path: Path) -> None:
    """LiteLLM passes it on to `openai/...`: to any model in OpenAI's format."""
    mark: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    world = World(tmp_path)
    blocks = [{"type": "thinking", "thinking": "It.", "signature": "s"}]
    answer = {"role": "assistant", "content": "It moves.", "reasoning_content": "It."}
    told = {"role": "system", "content": [{"type": "text", "text": "Be brief.", **mark}]}
    tool = {"type": "function", "function": {"name": "go"}, **mark}
    said = {**answer, "thinking_blocks": blocks, **mark}
    turns = [told, user({**VIDEO, **mark}, {**ASK, **mark}), said, {**user(ASK), **mark}]
    assert (await ask(world, messages=turns, tools=[tool])).status_code == 200
    turns = [{"role": "system", "content": "Be brief."}, user(VIDEO, ASK), answer, user(ASK)]
    assert (await ask(world, messages=turns)).status_code == 200
    marked, plain = world.engine.requests
    assert marked.turns == plain.turns
    assert marked.turns[2].reasoning == "It."


async def test_vllms_own_id_of_a_video_or_an_image_changes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    image = {"type": "image_url", "image_url": {"url": IMAGE_URL}, "uuid": "image-1"}
    assert (await ask(world, messages=[user({**VIDEO, "uuid": "clip-1"}, image, ASK)])).status_code == 200


@pytest.mark.parametrize("said", ["", "\n", None, [{"type": "text", "text": ""}]])
async def test_an_answer_that_says_nothing_can_be_sent_back_too(tmp_path: Path, said: Any) -> None:
    world = World(tmp_path)
    turns = [user(VIDEO, ASK), {"role": "assistant", "content": said}, user(ASK)]
    assert (await ask(world, messages=turns)).status_code == 200
    if isinstance(said, str):
        ours = [{"role": turn["role"], "content": said if turn["role"] == "assistant" else "What?"} for turn in turns]
        assert (await world.ask(prompt=None, messages=ours)).status_code == 200
    assert {request.turns[1].text.strip() for request in world.engine.requests} == {""}


@pytest.mark.parametrize("said", ["", "\n", [{"type": "text", "text": ""}]])
async def test_a_system_message_left_blank_is_no_error(tmp_path: Path, said: Any) -> None:
    """It is a turn all the same: without one, templates of released models insert a text of their own."""
    world = World(tmp_path)
    assert (await ask(world, messages=[{"role": "system", "content": said}, user(VIDEO, ASK)])).status_code == 200
    if isinstance(said, str):
        ours = [{"role": "system", "content": said}, {"role": "user", "content": "What?"}]
        assert (await world.ask(prompt=None, messages=ours)).status_code == 200
    assert {(request.turns[0].role, request.turns[0].text.strip()) for request in world.engine.requests} == {
        ("system", "")
    }


async def test_what_the_checkpoint_wants_counts_where_the_client_does_not_say(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.known = replace(INFO, default_sampling={"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05})
    world = World(tmp_path, engine)
    await ask(world)
    await ask(world, temperature=0, top_k=-1, repetition_penalty=1)
    await ask(world, temperature=None)
    await world.ask(top_k=3)
    asked = [(each.sampling.temperature, each.sampling.top_k, each.sampling.repetition_penalty)
             for each in engine.requests]  # fmt: skip
    assert asked == [(0.7, 20, 1.05), (0.0, 0, 1.0), (0.7, 20, 1.05), (0.7, 3, 1.05)]


async def test_values_that_newer_clients_know_change_nothing_either(tmp_path: Path) -> None:
    newer = {
        "service_tier": "fast", "reasoning_effort": "max", "verbosity": "tiny", "prompt_cache_retention": "7d",
        "prompt_cache_options": {"ttl": "30m"},
    }  # fmt: skip
    world = World(tmp_path)
    predicted = {"prediction": {"type": "content", "content": "A red square."}}
    assert (await ask(world, **newer, **predicted)).status_code == 200
    file = {"type": "input_file", "file_data": DATA_URL, "detail": "low"}
    message = {"role": "user", "content": [file, {"type": "input_text", "text": "What moves?"}]}
    as_usual = {"n": 1, "logprobs": False, "truncation": "disabled", "background": False, "prompt": None}
    body = {"input": [message], "text": {"verbosity": "tiny"}, "max_tool_calls": 3, **as_usual, **newer}
    assert (await world.client.post("/v1/responses", json=body)).status_code == 200


async def test_a_part_may_mark_where_a_prompt_that_is_to_be_kept_ends(tmp_path: Path) -> None:
    world, mark = World(tmp_path), {"prompt_cache_breakpoint": {"mode": "explicit"}}
    image = {"type": "image_url", "image_url": {"url": IMAGE_URL}}
    file = {"type": "file", "file": {"file_data": DATA_URL}}
    assert (await ask(world, messages=[user(*({**part, **mark} for part in (image, file, ASK)))])).status_code == 200
    parts = [
        {"type": "input_image", "image_url": IMAGE_URL},
        {"type": "input_file", "file_data": DATA_URL},
        {"type": "input_text", "text": "What moves?"},
    ]
    message = {"role": "user", "content": [{**part, **mark} for part in parts]}
    assert (await world.client.post("/v1/responses", json={"input": [message]})).status_code == 200


@pytest.mark.parametrize("detail", ["low", "high", "auto", "original"])
async def test_images_and_videos_have_one_size_whatever_detail_says(tmp_path: Path, detail: str) -> None:
    for kind, url in (("image_url", IMAGE_URL), ("video_url", DATA_URL)):
        part = {"type": kind, kind: {"url": url, "detail": detail}}
        assert (await ask(World(tmp_path), messages=[user(part, ASK)])).status_code == 200


async def test_the_template_is_told_what_the_client_says(tmp_path: Path) -> None:
    world = World(tmp_path)
    turns = [user(VIDEO, ASK), {"role": "assistant", "content": "A red"}]
    assert (await ask(world, messages=turns, add_generation_prompt=False, continue_final_message=True)).is_success
    assert (await ask(world, chat_template_kwargs={"enable_thinking": False, "add_vision_id": None})).is_success
    assert (await ask(world)).is_success
    continued, switched, plain = [request.template for request in world.engine.requests]
    assert continued == ChatTemplate(add_generation_prompt=False, continue_final_message=True)
    assert switched == ChatTemplate(switches={"enable_thinking": False})
    assert plain == ChatTemplate()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "messages.0.role"),
        ({"messages": [user(VIDEO, ASK), {"role": "assistant", "content": "A red"}]}, "messages.1.role"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
    ],
)
async def test_what_the_template_cannot_be_told_is_refused(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    response = await ask(World(tmp_path), **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_our_own_route_stays_strict(tmp_path: Path) -> None:
    assert (await World(tmp_path).ask(user="me")).status_code == 400
    assert (await World(tmp_path).ask(seed=-1)).status_code == 400
