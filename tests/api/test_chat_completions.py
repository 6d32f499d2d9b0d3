"""/v1/chat/completions on the wire: exactly OpenAI's shapes, and every supported field."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.api.chat import ASK, IMAGE, IMAGE_BYTES, IMAGE_URL, VIDEO, ask, user
from tests.api.test_stream import events_of
from tests.api.world import CLIP_BYTES, DATA_URL, FILE, World
from vidspec_models.request import VIDEO as SHOWN
from vidspec_models.request import SpeculationMode, Turn
from vidspec_service.decoding.clip import FrameRequest

pytestmark = [pytest.mark.api, pytest.mark.anyio]

USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 5,
    "total_tokens": 45,
    "prompt_tokens_details": {"video_tokens": 30, "cached_tokens": 2},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 1,
    },
}


async def test_a_whole_answer_is_a_chat_completion_and_nothing_else(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = await ask(world)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "fake-target",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "A red squäre.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }
    assert world.decoder.contents == [CLIP_BYTES]
    assert world.leftovers == []


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": None}, {}])
async def test_a_stream_has_openais_chunks_and_no_usage_unless_asked(tmp_path: Path, options: Any) -> None:
    events = events_of((await ask(World(tmp_path), stream=True, stream_options=options)).text)
    assert events[-1] == "[DONE]"
    assert len({(event["id"], event["created"]) for event in events[:-1]}) == 1
    assert {(event["object"], event["model"]) for event in events[:-1]} == {("chat.completion.chunk", "fake-target")}
    assert all(set(event) == {"id", "object", "created", "model", "choices"} for event in events[:-1])
    assert [event["choices"] for event in events[:-1]] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "A red"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": " squäre."}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]


@pytest.mark.parametrize("more", [{}, {"continuous_usage_stats": False}, {"continuous_usage_stats": True}])
async def test_with_include_usage_the_last_chunk_has_it_and_the_others_null(tmp_path: Path, more: Any) -> None:
    response = await ask(World(tmp_path), stream=True, stream_options={"include_usage": True, **more})
    events = events_of(response.text)
    assert [event["usage"] for event in events[:-2]] == [None] * 4
    assert (events[-2]["choices"], events[-2]["usage"]) == ([], USAGE)


@pytest.mark.parametrize(
    "part",
    [
        VIDEO,
        {"type": "input_video", "input_video": {"data": base64.b64encode(CLIP_BYTES).decode()}},
        {"type": "input_video", "input_video": {"data": DATA_URL}},
        {"type": "input_video", "input_video": {"url": DATA_URL}},
    ],
)
async def test_each_way_to_send_a_video_is_taken(tmp_path: Path, part: Any) -> None:
    world = World(tmp_path)
    assert (await ask(world, messages=[user(ASK, part)])).status_code == 200
    assert world.decoder.contents == [CLIP_BYTES]
    assert world.engine.requests[0].turns == (Turn(role="user", parts=("What moves?", SHOWN)),)


CAPITALS = DATA_URL.replace("data:video", "DATA:Video")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": CAPITALS}},
        {"type": "input_video", "input_video": {"data": CAPITALS}},
        {"type": "file", "file": {"file_data": CAPITALS}},
    ],
)
async def test_a_data_url_may_begin_with_capital_letters(tmp_path: Path, part: Any) -> None:
    world = World(tmp_path)
    assert (await ask(world, messages=[user(ASK, part)])).status_code == 200
    assert world.decoder.contents == [CLIP_BYTES]


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "file", "file": {"file_data": IMAGE_URL}},
        {"type": "file", "file": {"file_data": IMAGE_URL.replace("data:image", "DATA:Image")}},
    ],
)
async def test_an_image_is_a_clip_of_one_frame(tmp_path: Path, part: Any) -> None:
    world = World(tmp_path)
    assert (await ask(world, messages=[user(part, ASK)])).status_code == 200
    assert world.decoder.contents == [IMAGE_BYTES]
    assert world.decoder.requests[0].is_still
    assert world.engine.requests[0].turns == (Turn(role="user", parts=(SHOWN, "What moves?")),)
    assert world.leftovers == []


async def test_a_video_that_calls_itself_an_image_is_refused_and_so_is_the_other_way(tmp_path: Path) -> None:
    world = World(tmp_path)
    lies = (
        {"type": "image_url", "image_url": {"url": DATA_URL.replace("video/mp4", "image/png")}},
        {"type": "video_url", "video_url": {"url": IMAGE_URL.replace("image/png", "video/mp4")}},
    )
    for part in lies:
        response = await ask(world, messages=[user(part, ASK)])
        assert (response.status_code, response.json()["error"]["code"]) == (415, "video_unsupported")
    assert (world.decoder.requests, world.leftovers) == ([], [])


async def test_an_uploaded_video_is_a_file_part(tmp_path: Path) -> None:
    world = World(tmp_path)
    kept = (await world.client.post("/v1/videos", files=FILE)).json()
    part = {"type": "file", "file": {"file_id": kept["id"]}}
    assert (await ask(world, messages=[user(part, ASK)])).status_code == 200
    assert len(world.decoder.requests) == 1
    part = {"type": "file", "file": {"file_id": "video-none"}}
    assert (await ask(world, messages=[user(part, ASK)])).status_code == 404


async def test_a_conversation_keeps_the_video_in_its_turn(tmp_path: Path) -> None:
    world = World(tmp_path)
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi.", "refusal": None},
        user(ASK, VIDEO, {"type": "text", "text": "And why?"}, {"type": "text", "text": "Say it briefly."}),
        {"role": "assistant", "content": [{"type": "text", "text": "A square."}]},
        {"role": "user", "content": "Where to?"},
    ]
    assert (await ask(world, messages=turns)).status_code == 200
    assert world.engine.requests[0].turns == (
        Turn(role="system", parts=("Be brief.",)),
        Turn(role="user", parts=("Hello",)),
        Turn(role="assistant", parts=("Hi.",)),
        Turn(role="user", parts=("What moves?", SHOWN, "And why?\nSay it briefly.")),
        Turn(role="assistant", parts=("A square.",)),
        Turn(role="user", parts=("Where to?",)),
    )


@pytest.mark.parametrize("more", [[], [{"type": "text", "text": " "}]])
async def test_a_video_may_be_all_that_the_user_sends(tmp_path: Path, more: list[Any]) -> None:
    """What to do with it may be in the system message, or is the model's choice."""
    world = World(tmp_path)
    told = {"role": "system", "content": "Describe what you see."}
    assert (await ask(world, messages=[told, user(VIDEO, *more)])).status_code == 200
    assert (await ask(world, messages=[told, user(VIDEO, ASK), user(IMAGE, *more)])).status_code == 200
    items = [{"role": "user", "content": [VIDEO]}]
    assert (await world.client.post("/v1/responses", json={"input": items})).status_code == 200
    assert world.engine.requests[0].turns[1].num_videos == 1


async def test_the_system_messages_at_the_beginning_are_one_for_the_template(tmp_path: Path) -> None:
    world = World(tmp_path)
    told = [
        {"role": role, "content": content}
        for role, content in [("system", "Be brief."), ("system", ""), ("developer", "Name colours.")]
    ]
    assert (await ask(world, messages=[*told, user(VIDEO, ASK)])).status_code == 200
    assert (await world.client.post("/tokenize", json={"messages": [*told, user(ASK)]})).status_code == 200
    first = Turn(role="system", parts=("Be brief.\n\nName colours.",))
    assert [request.turns[0] for request in world.engine.requests] == [first, first]
    assert [turn.role for turn in world.engine.requests[0].turns] == ["system", "user"]


async def test_every_option_reaches_the_engine_or_the_decoder(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = await ask(
        world, max_completion_tokens=7, max_tokens=7, temperature=0.5, top_p=0.9, top_k=40, seed=3, stop="END", fps=2.5,
        max_frames=6, start_s=1, end_s=2.5, speculation="serial", compression="none",
    )  # fmt: skip
    assert response.status_code == 200, response.text
    asked = world.engine.requests[0]
    assert (asked.max_tokens, asked.stop, asked.speculation) == (7, ("END",), SpeculationMode.SERIAL)
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.5, 0.9, 40)
    assert asked.sampling.seed == 3
    assert world.decoder.requests == [FrameRequest(fps=2.5, max_frames=6, start_s=1.0, end_s=2.5)]
