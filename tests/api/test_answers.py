"""Non-streamed answers: their exact shape, and what the engine and the decoder were asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.uploads import upload
from tests.api.world import CLIP_BYTES, World
from tests.fakes import INFO, FakeEngine
from vidspec_models.request import VIDEO, Compression, SpeculationMode, Turn
from vidspec_service.decoding.clip import FrameRequest

pytestmark = [pytest.mark.api, pytest.mark.anyio]

EARLYTOM = {"compression": "earlytom"}

FACTS = {
    "usage": {
        "prompt_tokens": 40,
        "completion_tokens": 5,
        "total_tokens": 45,
        "prompt_tokens_details": {"video_tokens": 30, "cached_tokens": 2},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 1,
        },
    },
    "speculation": {
        "mode": "parallel",
        "acceptance_rate": 0.75,
        "mean_accepted_tokens": 1.5,
        "draft_video_tokens": 3,
    },
}


async def test_json_body_is_answered_in_exactly_the_documented_shape(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = await world.ask()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert list(answer) == [
        "id", "object", "created", "model", "choices", "usage", "video", "videos", "speculation", "timings"
    ]  # fmt: skip
    assert answer["id"].startswith("vchat-")
    assert answer["object"] == "video.chat.completion"
    assert answer["created"] > 1_700_000_000
    assert answer["model"] == "fake-target"
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "A red squäre."}, "finish_reason": "stop"}
    ]
    assert answer["usage"] == FACTS["usage"]
    assert answer["speculation"] == FACTS["speculation"]
    assert answer["videos"] == [answer["video"]]
    assert answer["video"].pop("id").startswith("video-")
    assert answer["video"] == {
        "duration_s": 3.0,
        "num_frames": 3,
        "timestamps_s": [0.0, 1.0, 2.0],
        "warnings": ["2 frames could not be decoded"],
    }
    timings = answer["timings"]
    assert (timings["queue_s"], timings["prefill_s"]) == (pytest.approx(0.25, abs=0.1), 0.5)
    assert 0 < timings["decode_s"] < timings["time_to_first_token_s"]
    assert set(timings) == {
        "queue_s", "decode_s", "prefill_s", "time_to_first_token_s", "time_per_output_token_s"
    }  # fmt: skip


async def test_form_and_json_give_the_same_answer_and_name_the_video_by_its_content(tmp_path: Path) -> None:
    world = World(tmp_path)
    answers = [(await world.ask()).json(), (await world.ask_form()).json()]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["video"] == answers[1]["video"]
    assert answers[0]["id"] != answers[1]["id"]
    assert world.decoder.contents == [CLIP_BYTES]  # the second request found the frames in memory
    assert world.leftovers == []


async def test_every_field_of_a_form_reaches_the_engine_or_the_decoder(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = await world.ask_form(
        stream="false",
        max_tokens="7",
        temperature="0.5",
        top_p="0.9",
        top_k="40",
        seed=str(2**64 - 1),
        stop=["END", "."],
        fps="2.5",
        max_frames="6",
        start_s="1",
        end_s="2.5",
        speculation="serial",
        compression="dycoke",
    )
    assert response.status_code == 200, response.text
    asked = world.engine.requests[0]
    assert asked.max_tokens == 7
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.5, 0.9, 40)
    assert asked.sampling.seed == 2**64 - 1
    assert asked.stop == ("END", ".")
    assert (asked.speculation, asked.compression) == (SpeculationMode.SERIAL, Compression.DYCOKE)
    assert asked.turns == (Turn(role="user", parts=(VIDEO, "What moves?")),)
    assert asked.videos[0].frames.shape == (3, 4, 6, 3)
    assert asked.videos[0].source_num_frames == 75
    assert world.decoder.requests == [FrameRequest(fps=2.5, max_frames=6, start_s=1.0, end_s=2.5)]


async def test_the_video_belongs_to_the_first_user_turn(tmp_path: Path) -> None:
    world = World(tmp_path)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What moves?"},
        {"role": "assistant", "content": "A square."},
        {"role": "user", "content": "Where to?"},
    ]
    assert (await world.ask(prompt=None, messages=turns)).status_code == 200
    assert [message.num_videos for message in world.engine.requests[0].turns] == [0, 1, 0, 0]


async def test_a_conversation_travels_through_a_form_as_json_text(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = await world.ask_form(prompt=[], messages='[{"role": "user", "content": "Hm?"}]')
    assert response.status_code == 200, response.text
    assert world.engine.requests[0].turns[0].text == "Hm?"


async def test_without_options_the_servers_defaults_hold(tmp_path: Path) -> None:
    world = World(tmp_path, speculation="serial")
    await world.ask()
    asked = world.engine.requests[0]
    assert asked.max_tokens is None
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.0, 1.0, 0)
    assert (asked.speculation, asked.compression) == (SpeculationMode.SERIAL, Compression.NONE)
    assert world.decoder.requests == [FrameRequest()]


async def test_the_operator_may_compress_and_a_request_may_decline(tmp_path: Path) -> None:
    world = World(tmp_path, compression="dycoke")
    await world.ask()
    await world.ask(compression="none")
    assert [asked.compression for asked in world.engine.requests] == [Compression.DYCOKE, Compression.NONE]


async def test_a_ratio_goes_with_a_compression(tmp_path: Path) -> None:
    world = World(tmp_path, compression="v-cast", compression_ratio=0.5)
    await world.ask()
    await world.ask(compression="vidcom2", compression_ratio=0.1)
    assert [asked.compression_ratio for asked in world.engine.requests] == [0.5, 0.1]
    refused = await world.ask(compression="none", compression_ratio=0.1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "compression_ratio"
    assert (await world.ask(compression_ratio=0)).status_code == 400


@pytest.mark.parametrize(("settings", "fields"), [({}, EARLYTOM), (EARLYTOM, {})])
async def test_merging_in_the_tower_is_refused_where_the_tower_cannot(
    tmp_path: Path, settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    world = World(tmp_path, **settings)
    world.assert_refused(await world.ask(**fields), "compression", "vidcom2")
    world.engine.known = replace(INFO, can_merge_frames=True)
    assert (await world.ask(**fields)).status_code == 200


async def test_no_video_has_more_frames_than_the_model_was_made_for(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.known = replace(INFO, max_frames=8)
    world = World(tmp_path, engine)
    kept = await upload(world)
    await world.ask(video=None, video_id=kept["id"])
    assert world.decoder.requests == [FrameRequest(max_frames=8)], "decoded once, by the upload"
    for asked, most in (
        ({"num_frames": 16}, 8),
        ({"fps": 2.0, "max_frames": 4}, 4),
        ({"fps": 3.0, "max_frames": 100}, 8),
    ):
        await world.ask(**asked)
        assert world.decoder.requests[-1] == FrameRequest(**{**asked, "max_frames": most})  # type: ignore[arg-type]


async def test_a_seed_is_drawn_for_each_request_that_has_none(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.ask()
    await world.ask()
    seeds = {request.sampling.seed for request in world.engine.requests}
    assert len(seeds) == 2
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_request_ids_of_clients_never_become_ids_of_the_engine(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.client.headers["x-request-id"] = "same"
    await world.ask()
    await world.ask()
    assert len({request.request_id for request in world.engine.requests}) == 2


@pytest.mark.parametrize("stop", [None, "END", ["END"], ["a", "b", "c", "d"], []])
async def test_stop_is_one_string_or_a_list(tmp_path: Path, stop: Any) -> None:
    world = World(tmp_path)
    assert (await world.ask(stop=stop)).status_code == 200
    assert world.engine.requests[0].stop == tuple([stop] if isinstance(stop, str) else stop or [])


async def test_json_null_means_not_given(tmp_path: Path) -> None:
    world = World(tmp_path)
    body = {"video": None, "video_id": None, "prompt": None}
    response = await world.client.post("/v1/video-chat", json=body)
    assert response.json()["error"]["param"] == "prompt"


async def test_a_finished_engine_stream_is_not_counted_as_cancelled(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine())
    await world.ask()
    assert world.engine.cancelled == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [None, 17])
async def test_the_seed_is_told_before_the_first_word(tmp_path: Path, seed: int | None, stream: bool) -> None:
    world = World(tmp_path)
    ours = await world.ask(seed=seed, stream=stream)
    chat = {"model": "fake-target", "messages": [{"role": "user", "content": "Hello."}], "stream": stream}
    theirs = await world.client.post("/v1/chat/completions", json=chat if seed is None else {**chat, "seed": seed})
    told = [int(response.headers["x-seed"]) for response in (ours, theirs)]
    assert told == [request.sampling.seed for request in world.engine.requests]
    assert (told == [17, 17]) is (seed == 17)
