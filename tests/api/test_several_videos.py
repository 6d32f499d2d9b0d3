"""Several videos and images in one request, or none: order, limits, error messages, and leftover files."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.chat import ASK, IMAGE, IMAGE_BYTES, VIDEO, ask, user
from tests.api.test_disconnect import LeavingClient
from tests.api.test_stream import events_of
from tests.api.uploads import upload
from tests.api.world import CLIP_BYTES, DATA_URL, FILE, URL, World, hold_deadlines, until
from tests.fakes import ANSWER, FakeDecodePool, FakeEngine, clip
from vidspec_models.request import VIDEO as SHOWN
from vidspec_models.request import Turn
from vidspec_service.api.uploads.json_body import MAX_TEXT_BYTES
from vidspec_service.decoding.clip import Clip, FrameRequest
from vidspec_service.errors import InvalidRequest, VideoUnreadable

pytestmark = [pytest.mark.api, pytest.mark.anyio]

BAD = CLIP_BYTES + b"-damaged"


class PickyDecoder(FakeDecodePool):
    """Finds one content unreadable."""

    async def decode(self, path: Path, request: FrameRequest) -> Clip:
        decoded = await super().decode(path, request)
        if self.contents[-1] == BAD:
            raise VideoUnreadable("No frame can be decoded.", param="video")
        return decoded


def content(number: int) -> bytes:
    return CLIP_BYTES + bytes([number])


def data_url(video: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(video).decode()}"


def video_part(video: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(video)}}


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def test_parts_reach_the_model_in_the_order_they_were_sent(tmp_path: Path) -> None:
    world = World(tmp_path)
    turns = [
        user(say("First"), video_part(content(1)), say("then"), IMAGE, video_part(content(2)), say("differ how?")),
        {"role": "assistant", "content": "In colour."},
        user(video_part(content(3)), ASK),
    ]
    assert (await ask(world, messages=turns)).status_code == 200
    assert world.engine.requests[0].turns == (
        Turn(role="user", parts=("First", SHOWN, "then", SHOWN, SHOWN, "differ how?")),
        Turn(role="assistant", parts=("In colour.",)),
        Turn(role="user", parts=(SHOWN, "What moves?")),
    )
    assert len(world.engine.requests[0].videos) == 4
    assert sorted(world.decoder.contents) == sorted([content(1), IMAGE_BYTES, content(2), content(3)])
    assert sorted(each.num_sharing for each in world.decoder.requests if not each.is_still) == [3, 3, 3]
    assert world.leftovers == []


async def test_what_is_asked_of_the_videos_is_not_asked_of_an_image_beside_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    asked = {"num_frames": 3, "start_s": 0.5, "end_s": 3}
    assert (await ask(world, messages=[user(video_part(content(1)), IMAGE, ASK)], **asked)).status_code == 200
    assert sorted(world.decoder.requests, key=lambda each: each.is_still) == [
        FrameRequest(num_frames=3, start_s=0.5, end_s=3),
        FrameRequest(is_still=True, num_frames=1),
    ]


@pytest.mark.parametrize("path", [URL, "/v1/chat/completions"])
async def test_a_request_may_be_text_alone(tmp_path: Path, path: str) -> None:
    world = World(tmp_path)
    body = {"prompt": "Suggest a title."} if path == URL else {"messages": [user(say("Suggest a title."))]}
    response = await world.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert (world.engine.requests[0].videos, world.decoder.requests) == ((), [])
    assert world.engine.requests[0].turns == (Turn(role="user", parts=("Suggest a title.",)),)
    if path == URL:
        assert (response.json()["video"], response.json()["videos"]) == (None, [])


async def test_json_takes_videos_of_every_kind_in_their_order_and_tells_each(tmp_path: Path) -> None:
    world = World(tmp_path)
    kept = await upload(world)
    videos = [{"video": data_url(content(1))}, {"video_id": kept["id"]}, {"video": data_url(content(2))}]
    response = await world.client.post(URL, json={"prompt": "x", "videos": videos})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["video"] is None
    assert len({each["id"] for each in answer["videos"]}) == 3
    assert answer["videos"][1]["id"] == kept["id"]
    assert all(each["num_frames"] == 3 for each in answer["videos"])
    assert world.engine.requests[0].turns == (Turn(role="user", parts=(SHOWN, SHOWN, SHOWN, "x")),)
    assert len({video.key for video in world.engine.requests[0].videos}) == 3


async def test_a_form_takes_repeated_parts_of_every_kind_in_their_order(tmp_path: Path) -> None:
    world = World(tmp_path)
    kept = await upload(world)
    parts: list[tuple[str, Any]] = [
        ("video", ("a", content(1))),
        ("video_id", (None, kept["id"])),
        ("prompt", (None, "Which is longer?")),
        ("video", ("b", content(2))),
        ("stream", (None, "true")),
    ]
    response = await world.client.post(URL, files=parts)
    told = events_of(response.text)[-2]["videos"]
    alone = [(await world.ask(video=data_url(content(number)))).json()["video"]["id"] for number in (1, 2)]
    assert [each["id"] for each in told] == [alone[0], kept["id"], alone[1]]
    await world.client.delete(f"/v1/videos/{kept['id']}")
    assert world.leftovers == []


@pytest.mark.parametrize("kind", ["form", "json", "chat"])
async def test_the_ninth_video_is_refused_and_names_the_setting(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path)
    if kind == "form":
        ninth = ("video", ("x", b"no video, which nobody sees: it is not read"))
        response = await world.client.post(URL, files=[("video", FILE["video"])] * 8 + [ninth], data={"prompt": "x"})
    elif kind == "json":
        response = await world.client.post(URL, json={"prompt": "x", "videos": [{"video": DATA_URL}] * 9})
    else:
        response = await ask(world, messages=[user(*[VIDEO] * 8, IMAGE, ASK)])
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (413, "video_too_large", "videos")
    assert "the limit is 8 (VIDSPEC_MAX_VIDEOS_PER_REQUEST)" in error["message"]
    assert (world.decoder.requests, world.leftovers, world.admission.num_admitted) == ([], [], 0)


async def test_a_form_may_have_as_many_videos_as_the_setting_says(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = await world.client.post(URL, files=[("video", FILE["video"])] * 8, data={"prompt": "x"})
    assert (response.status_code, len(response.json()["videos"])) == (200, 8)


async def test_videos_that_are_longer_than_any_text_are_not_mixed_up(tmp_path: Path) -> None:
    """Such strings are set aside before the body is parsed."""
    world = World(tmp_path, decode_workers=1)
    large = [content(number).ljust(MAX_TEXT_BYTES, b"v") for number in range(3)]
    bare = {"type": "file", "file": {"file_data": base64.b64encode(large[2]).decode()}}
    response = await ask(world, messages=[user(video_part(large[0]), video_part(large[1]), bare, ASK)])
    assert response.status_code == 200, response.text
    assert world.decoder.contents == large


@pytest.mark.parametrize("kind", ["form", "json", "chat"])
async def test_one_bad_video_among_good_ones_is_named_and_ends_the_others(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path, decoder=PickyDecoder())
    sent = [content(1), content(2), BAD, content(3)]
    if kind == "form":
        files = [("video", ("x", each)) for each in sent]
        response = await world.client.post(URL, files=files, data={"prompt": "x"})
    elif kind == "json":
        videos = [{"video": data_url(each)} for each in sent]
        response = await world.client.post(URL, json={"prompt": "x", "videos": videos})
    else:
        response = await ask(world, messages=[user(*map(video_part, sent), ASK)])
    assert response.status_code == 422
    assert response.json()["error"] == {
        "message": "videos.2: No frame can be decoded.",
        "type": "invalid_request_error",
        "param": "videos.2",
        "code": "video_unreadable",
    }
    assert (world.engine.requests, world.leftovers, world.admission.num_admitted) == ([], [], 0)


async def test_a_field_that_does_not_fit_a_video_is_named_and_the_video_in_words(tmp_path: Path) -> None:
    world = World(tmp_path, decoder=FakeDecodePool(InvalidRequest("No frame lies there.", param="start_s")))
    videos = [{"video": data_url(content(1))}, {"video": data_url(content(2))}]
    response = await world.client.post(URL, json={"prompt": "x", "videos": videos, "start_s": 9})
    error = response.json()["error"]
    assert error["message"] in ("videos.0: No frame lies there.", "videos.1: No frame lies there.")
    assert error["param"] == "start_s"


async def test_a_file_that_is_no_video_is_named_before_the_rest_is_read(tmp_path: Path) -> None:
    world = World(tmp_path)
    files: list[tuple[str, Any]] = [("video", FILE["video"]), ("video", ("x", b"no video at all"))]
    response = await world.client.post(URL, files=files, data={"prompt": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (415, "videos.1")
    videos = [{"video": DATA_URL}, {"video_id": "video-none"}]
    response = await world.client.post(URL, json={"prompt": "x", "videos": videos})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "videos.1")
    assert (world.decoder.requests, world.leftovers) == ([], [])


@pytest.mark.parametrize(
    ("videos", "param"),
    [
        ([{}], "videos"),
        ([{"video": DATA_URL, "video_id": "a"}], "videos"),
        ([{"video": DATA_URL, "fsp": 2}], "videos.0.fsp"),
        ([{"video": DATA_URL}, {"video": 5}], "videos.1.video"),
        ([{"video": DATA_URL}, {"video": "data:,x"}], "videos.1"),
        ([{"video": DATA_URL}, {"video": DATA_URL, "fps": 2}], "videos.1"),
    ],
)
async def test_a_wrong_entry_is_a_400_that_names_it(tmp_path: Path, videos: Any, param: str) -> None:
    world = World(tmp_path)
    response = await world.client.post(URL, json={"prompt": "x", "videos": videos})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert world.leftovers == []


async def test_several_videos_and_the_field_for_one_are_not_mixed(tmp_path: Path) -> None:
    response = await World(tmp_path).ask(videos=[{"video": DATA_URL}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "video")


async def test_all_files_of_a_request_count_together(tmp_path: Path) -> None:
    world = World(tmp_path, max_upload_bytes=2 * len(CLIP_BYTES))
    assert (await ask(world, messages=[user(VIDEO, VIDEO, ASK)])).status_code == 200
    response = await ask(world, messages=[user(VIDEO, VIDEO, VIDEO, ASK)])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (413, "videos.2")
    assert "together are too large" in error["message"]
    assert world.leftovers == []


@pytest.mark.parametrize("limit", [{"max_frames": 6}, {"max_decoded_bytes": 6 * clip().video.frames[0].nbytes}])
async def test_frames_of_all_videos_count_together_also_where_they_were_in_memory(
    tmp_path: Path, limit: dict[str, Any]
) -> None:
    world = World(tmp_path, **limit)
    assert (await world.ask(num_frames=3)).status_code == 200
    assert (await ask(world, messages=[user(VIDEO, VIDEO, ASK)], num_frames=3)).status_code == 200
    response = await ask(world, messages=[user(VIDEO, VIDEO, VIDEO, ASK)], num_frames=3)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (413, "videos")
    assert [f"VIDSPEC_{name.upper()}" in error["message"] for name in limit] == [True]


async def test_an_image_beside_a_video_that_has_all_frames_of_a_request_is_taken(tmp_path: Path) -> None:
    world = World(tmp_path, max_frames=6)
    assert (await ask(world, messages=[user(VIDEO, IMAGE, IMAGE, ASK)], num_frames=6)).status_code == 200
    assert (await ask(world, messages=[user(VIDEO, IMAGE, VIDEO, ASK)], num_frames=3)).status_code == 200


async def test_a_clip_is_found_again_beside_another_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    await ask(world, messages=[user(video_part(content(1)), ASK)], num_frames=3)
    await ask(world, messages=[user(video_part(content(2)), video_part(content(1)), ASK)], num_frames=3)
    assert world.decoder.contents == [content(1), content(2)]
    assert (world.metric("mm_cache_queries_total"), world.metric("mm_cache_hits_total")) == (3, 1)
    keys = [[video.key for video in request.videos] for request in world.engine.requests]
    assert keys[1][1] == keys[0][0] != keys[1][0]


async def test_the_default_number_of_frames_is_another_choice_for_two_videos(tmp_path: Path) -> None:
    world = World(tmp_path)
    for turn in (user(VIDEO, ASK), user(VIDEO, video_part(content(1)), ASK), user(VIDEO, IMAGE, ASK)):
        assert (await ask(world, messages=[turn])).status_code == 200
    shared = [(each.is_still, each.num_sharing) for each in world.decoder.requests]
    assert shared == [(False, 1), (False, 2), (False, 2), (True, 1)]  # an image takes no share of the frames


async def test_several_are_decoded_beside_each_other(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, decoder=FakeDecodePool(gate=gate), decode_workers=4)
    running = asyncio.create_task(ask(world, messages=[user(*(video_part(content(i)) for i in range(4)), ASK)]))
    await until(lambda: len(world.decoder.contents) == 4)
    gate.set()
    assert (await running).status_code == 200
    assert world.leftovers == []


async def test_leaving_in_the_middle_stops_every_decode(tmp_path: Path) -> None:
    world = World(tmp_path, decoder=FakeDecodePool(gate=asyncio.Event()), decode_workers=3)
    videos = [{"video": data_url(content(number))} for number in range(3)]
    client = LeavingClient(world, json.dumps({"prompt": "x", "videos": videos}).encode())
    await client.leave_when(lambda: len(world.decoder.contents) == 3)
    assert world.decoder.num_cancelled == 3
    assert (world.engine.requests, world.leftovers, world.admission.num_admitted) == ([], [], 0)


async def test_leaving_a_stream_about_two_videos_leaves_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER[:2], asyncio.Event()))
    videos = [{"video": data_url(content(number))} for number in range(2)]
    client = LeavingClient(world, json.dumps({"prompt": "x", "videos": videos, "stream": True}).encode())
    await client.leave_when(lambda: "A red" in client.text and world.leftovers == [])
    assert (len(world.engine.cancelled), world.admission.num_admitted) == (1, 0)


async def test_a_deadline_in_the_middle_of_several_decodes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, decoder=FakeDecodePool(gate=asyncio.Event()), request_timeout_s=0.1)
    hold_deadlines(monkeypatch, until=lambda: len(world.decoder.contents) == 2)
    response = await ask(world, messages=[user(VIDEO, IMAGE, ASK)])
    assert response.status_code == 504
    assert (world.decoder.num_cancelled, world.leftovers, world.admission.num_admitted) == (2, [], 0)


async def test_a_bad_file_of_a_form_is_named_by_its_place_among_all_videos(tmp_path: Path) -> None:
    files, data = {"video": ("a.m3u8", b"#EXTM3U\n" * 10)}, {"prompt": "x", "video_id": "video-0"}
    refused = await World(tmp_path).client.post("/v1/video-chat", files=files, data=data)
    assert (refused.status_code, refused.json()["error"]["param"]) == (415, "videos.1")
