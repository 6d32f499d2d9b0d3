"""/v1/videos: a video is uploaded once, asked about many times, and decoded once for each choice of frames."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.uploads import ALICE, BOB, VIDEOS, as_, other_clip, upload
from tests.api.world import CLIP_BYTES, DATA_URL, FILE, PATIENCE_S, World
from tests.fakes import ANSWER, INFO, FakeDecodePool, FakeEngine
from vidspec_service.api.store.video_store import VideoStore
from vidspec_service.api.uploads.form import MAX_FIELD_BYTES
from vidspec_service.decoding.clip import FrameRequest
from vidspec_service.errors import VideoTooLarge, VideoUnreadable, VideoUnsupported

pytestmark = [pytest.mark.api, pytest.mark.anyio]

ID = f"video-{hashlib.sha256(CLIP_BYTES).hexdigest()[:32]}"


async def test_an_upload_is_told_with_its_facts_and_named_by_its_content(tmp_path: Path) -> None:
    world = World(tmp_path, video_ttl_s=100)
    kept = await upload(world)
    now = time.time()
    assert now - 5 <= kept.pop("created_at") <= now
    assert now + 95 <= kept.pop("expires_at") <= now + 100
    assert kept == {
        "id": ID, "object": "video", "bytes": len(CLIP_BYTES), "duration_s": 3.0, "width": 6, "height": 4,
        "fps": 25.0, "num_source_frames": 75, "codec": "h264", "warnings": ["2 frames could not be decoded"],
    }  # fmt: skip
    (path,) = world.leftovers
    assert path.read_bytes() == CLIP_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert (world.admission.num_admitted, world.admission.num_bytes) == (0, 0)


@pytest.mark.parametrize("json", [True, False])
async def test_the_same_content_is_kept_once_whatever_the_body(tmp_path: Path, json: bool) -> None:
    world = World(tmp_path)
    first = await upload(world)
    response = await world.client.post(VIDEOS, **({"json": {"video": DATA_URL}} if json else {"files": FILE}))
    assert response.json()["id"] == first["id"]
    assert len(world.leftovers) == 1
    assert len(world.decoder.requests) == 1


async def test_questions_about_a_kept_video_need_no_bytes_and_no_second_decode(tmp_path: Path) -> None:
    world = World(tmp_path)
    kept = await upload(world)
    first = await world.ask(video=None, video_id=kept["id"])
    second = await world.ask(video=None, video_id=kept["id"], prompt="And now?", stream=True)
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["video"]["id"] == kept["id"]
    assert first.json()["video"]["num_frames"] == 3
    assert len(world.decoder.requests) == 1
    keys = {request.videos[0].key for request in world.engine.requests}
    assert len(keys) == 1
    assert None not in keys


async def test_other_frames_of_it_are_decoded_and_are_another_key(tmp_path: Path) -> None:
    world = World(tmp_path)
    kept = await upload(world)
    for fields in ({}, {"fps": 2}, {"num_frames": 2}, {"num_frames": 2, "start_s": 1}, {"fps": 2}):
        assert (await world.ask(video=None, video_id=kept["id"], **fields)).status_code == 200
    assert world.decoder.requests == [
        FrameRequest(), FrameRequest(fps=2), FrameRequest(num_frames=2), FrameRequest(num_frames=2, start_s=1),
    ]  # fmt: skip
    assert len({request.videos[0].key for request in world.engine.requests}) == 4


async def test_another_video_and_another_caller_are_other_keys(tmp_path: Path) -> None:
    world = World(tmp_path, keys=[ALICE, BOB])
    for key in (ALICE, BOB):
        for files in (FILE, other_clip(1)):
            await world.client.post("/v1/video-chat", files=files, data={"prompt": "x"}, headers=as_(key))
    assert len({request.videos[0].key for request in world.engine.requests}) == 4
    assert len(world.decoder.requests) == 4


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (VideoUnsupported("Not a video.", param="video"), 415),
        (VideoUnreadable("No frame can be decoded.", param="video"), 422),
        (VideoTooLarge("Longer than 3600 s.", param="video"), 413),
    ],
)
async def test_a_bad_video_is_refused_when_it_is_uploaded(tmp_path: Path, error: Exception, status: int) -> None:
    world = World(tmp_path, decoder=FakeDecodePool(error))
    assert (await world.client.post(VIDEOS, files=FILE)).status_code == status
    assert (world.leftovers, world.admission.num_admitted) == ([], 0)
    assert (await world.client.get(VIDEOS)).json()["data"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"json": {}}, "video"),
        ({"json": {"video": DATA_URL, "video_url": "https://a/"}}, "video"),
        ({"json": {"video": "data:,x"}}, "video"),
        ({"json": {"video_url": "https://a.example/b.mp4"}}, "video_url"),
        ({"json": {"video": DATA_URL, "prompt": "x"}}, "prompt"),
        ({"files": {**FILE, "purpose": (None, "vision")}}, "purpose"),
        ({"files": {"video": (None, "clip.mp4")}}, "video"),
    ],
)
async def test_a_wrong_upload_is_a_400_that_names_the_field(tmp_path: Path, body: Any, param: str) -> None:
    world = World(tmp_path)
    response = await world.client.post(VIDEOS, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert world.leftovers == []


async def test_a_file_under_another_name_is_refused_for_its_name_and_not_as_a_text_that_is_too_long(
    tmp_path: Path,
) -> None:
    files = {"file": ("clip.mp4", bytes(2 * MAX_FIELD_BYTES), "video/mp4")}
    error = (await World(tmp_path).client.post(VIDEOS, files=files)).json()["error"]
    assert error["param"] == "file"
    assert "Unknown field" in error["message"]


async def test_an_upload_is_decoded_as_the_model_will_see_it_and_only_while_there_is_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.engine.known = replace(INFO, max_frames=2)
    kept = await upload(world)
    assert (await world.ask(video=None, video_id=kept["id"])).status_code == 200
    assert [asked.max_frames for asked in world.decoder.requests] == [2]
    world.engine.is_ready = False
    assert (await world.client.post(VIDEOS, files=other_clip(1))).status_code == 503
    assert len(world.decoder.requests) == 1


async def test_an_upload_that_takes_too_long_to_decode_or_to_keep_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forever(*_: object) -> None:
        await asyncio.Event().wait()

    for owner, step in ((FakeDecodePool, "decode"), (VideoStore, "keep")):
        with monkeypatch.context() as slow:
            slow.setattr(owner, step, forever)
            world = World(tmp_path, request_timeout_s=0.05)
            async with asyncio.timeout(PATIENCE_S):
                assert (await world.client.post(VIDEOS, files=FILE)).status_code == 504
        assert world.leftovers == []


async def test_an_upload_needs_a_place_like_everything_else(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER), max_running_requests=1, max_queued_requests=0)
    with world.admission.permit("somebody", "somebody"):
        assert (await world.client.post(VIDEOS, files=FILE)).status_code == 503
    assert (await world.client.post(VIDEOS, files=FILE)).status_code == 200


async def test_the_list_comes_page_by_page(tmp_path: Path) -> None:
    world = World(tmp_path)
    ids = []
    for number in range(5):
        files = {"video": ("a.mp4", CLIP_BYTES + bytes([number]))}
        ids.append((await world.client.post("/v1/videos", files=files)).json()["id"])
    found: list[str] = []
    after: dict[str, str] = {}
    for expected, has_more in ((2, True), (2, True), (1, False)):
        page = (await world.client.get("/v1/videos", params={"limit": 2, **after})).json()
        assert (len(page["data"]), page["has_more"]) == (expected, has_more)
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        found += [video["id"] for video in page["data"]]
        after = {"after": page["last_id"]}
    assert found == ids[::-1]
    assert (await world.client.get("/v1/videos", params=after)).json()["data"] == []
    for params, status, param in (
        ({"limit": 0}, 400, "limit"),
        ({"limit": 101}, 400, "limit"),
        ({"after": "video-of-nobody"}, 404, "after"),
    ):
        response = await world.client.get("/v1/videos", params=params)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert (await world.client.get("/v1/videos?limit=0")).json()["error"]["message"].startswith("limit: ")
