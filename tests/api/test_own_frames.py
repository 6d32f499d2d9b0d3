"""A client's own frames on the wire: `data:video/jpeg;base64,F1,F2,...` in either dialect; no image is decoded here."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.api.chat import ASK, URL, VIDEO, user
from tests.api.test_several_videos import content, data_url
from tests.api.world import World
from tests.hostile.stills import still
from vidspec_models.request import VIDEO as SHOWN
from vidspec_models.request import Turn
from vidspec_service.decoding.clip import FrameSequence

pytestmark = [pytest.mark.api, pytest.mark.anyio]

CHAT = "/v1/video-chat"
FRAMES = [b"\xff\xd8\xff" + bytes([number]) * (number + 1) for number in range(3)]


def frames_url(*frames: bytes) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)


def frames_part(*frames: bytes, **times: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": frames_url(*frames), **times}}


async def test_frames_reach_the_decoder_as_one_file_with_their_lengths_and_times(tmp_path: Path) -> None:
    world = World(tmp_path)
    url = frames_url(*FRAMES).replace("data:video/jpeg", "DATA:Video/JPEG")
    part = {"type": "video_url", "video_url": {"url": url, "timestamps_s": [12, 12.001, 14]}}
    body = {"messages": [user(part, ASK)]}
    response = await world.client.post(URL, json=body)
    assert response.status_code == 200, response.text
    assert world.decoder.contents == [b"".join(FRAMES)]
    (asked,) = world.decoder.requests
    assert asked.sequence == FrameSequence(num_bytes=(4, 5, 6), timestamps_s=(12.0, 12.001, 14.0))
    assert not asked.is_still
    assert world.engine.requests[0].turns == (Turn(role="user", parts=(SHOWN, "What moves?")),)
    assert world.leftovers == []


@pytest.mark.parametrize(("times", "fps"), [({"fps": 4}, 4.0), ({}, 1.0)])
async def test_a_rate_makes_the_times_and_without_one_it_is_one_a_second(
    tmp_path: Path, times: dict[str, Any], fps: float
) -> None:
    world = World(tmp_path)
    videos = [{"video": frames_url(*FRAMES), **times}, {"video": data_url(content(1))}]
    response = await world.client.post(CHAT, json={"prompt": "x", "videos": videos})
    assert response.status_code == 200, response.text
    sequence = world.decoder.requests[0].sequence
    assert sequence == FrameSequence(num_bytes=(4, 5, 6), timestamps_s=(0.0, 1 / fps, 2 / fps), fps=fps)
    assert [each["num_frames"] for each in response.json()["videos"]] == [3, 3]


async def test_the_same_frames_at_other_times_are_another_clip(tmp_path: Path) -> None:
    world = World(tmp_path)
    for fps in (1, 1, 2):
        await world.client.post(URL, json={"messages": [user(frames_part(*FRAMES, fps=fps), ASK)]})
    assert len(world.decoder.requests) == 2


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        (frames_part(*FRAMES, timestamps_s=[0, 1]), "timestamps_s", "3 frames but 2 timestamps_s"),
        (frames_part(*FRAMES, timestamps_s=[0, 1, 1]), "timestamps_s", "increase by 0.001"),
        (frames_part(*FRAMES, timestamps_s=[2, 1, 0]), "timestamps_s", "increase by 0.001"),
        (frames_part(*FRAMES, timestamps_s=[0, 1, 2], fps=1), "timestamps_s", "not both"),
        (frames_part(*FRAMES, timestamps_s=[]), "messages.0.content.0.video_url.timestamps_s", ""),
        (frames_part(*FRAMES, timestamps_s=[-1, 0, 1]), "messages.0.content.0.video_url.timestamps_s.0", ""),
        (frames_part(*FRAMES, fps=0), "messages.0.content.0.video_url.fps", ""),
        (frames_part(*FRAMES, fps=1e9), "messages.0.content.0.video_url.fps", ""),
        (frames_part(FRAMES[0], b"\xff"[:0]), "video", "Frame 1"),
        (frames_part(FRAMES[0], still("PNG")), "video", "Frame 1 is not a JPEG image"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;charset=x,/9j/"}}, "video", ";base64,"),
        ({"type": "video_url", "video_url": {"url": frames_url(FRAMES[0]) + ",@@@@"}}, "video", "Frame 1's base64"),
    ],
)
async def test_frames_that_make_no_sense_are_refused_with_what_is_wrong(
    tmp_path: Path, part: Any, param: str, words: str
) -> None:
    world = World(tmp_path)
    response = await world.client.post(URL, json={"messages": [user(part, ASK)]})
    error = response.json()["error"]
    assert response.status_code in (400, 415), response.text
    assert error["param"] == param
    assert words in error["message"]
    assert (world.decoder.requests, world.leftovers) == ([], [])


@pytest.mark.parametrize(
    ("settings", "times", "words"),
    [
        ({"max_frames": 2}, {}, "VIDSPEC_MAX_FRAMES"),
        ({"max_upload_bytes": 14}, {}, "The frames have 15 bytes; the limit is 14 bytes (VIDSPEC_MAX_UPLOAD_BYTES)"),
        (
            {"max_duration_s": 60},
            {"timestamps_s": [0, 1, 61]},
            "The last frame is shown at 61 s; the limit is 60 s (VIDSPEC_MAX_DURATION_S)",
        ),
        ({"max_duration_s": 60}, {"fps": 0.01}, "VIDSPEC_MAX_DURATION_S"),
        (
            {"max_duration_s": 60},
            {"fps": 0.045},
            "The frames last 66.6667 s; the limit is 60 s (VIDSPEC_MAX_DURATION_S)",
        ),
        ({"max_duration_s": 60}, {"fps": 1e-300}, "The frames last 3e+300 s"),
    ],
)
async def test_frames_over_a_limit_are_a_413_that_names_it(
    tmp_path: Path, settings: Any, times: Any, words: str
) -> None:
    world = World(tmp_path, **settings)
    response = await world.client.post(URL, json={"messages": [user(frames_part(*FRAMES, **times), ASK)]})
    assert response.status_code == 413, response.text
    assert words in response.json()["error"]["message"]
    assert (world.decoder.requests, world.leftovers) == ([], [])


async def test_frames_at_every_limit_are_taken(tmp_path: Path) -> None:
    world = World(tmp_path, max_frames=3, max_upload_bytes=15, max_duration_s=60)
    response = await world.client.post(
        URL, json={"messages": [user(frames_part(*FRAMES, timestamps_s=[0, 1, 60]), ASK)]}
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("settings", [{"max_frames": 3}, {"max_upload_bytes": 17}])
async def test_their_number_and_size_are_looked_at_before_any_of_them_is(tmp_path: Path, settings: Any) -> None:
    part = {"type": "video_url", "video_url": {"url": frames_url(*FRAMES) + ",@@@@"}}
    response = await World(tmp_path, **settings).client.post(URL, json={"messages": [user(part, ASK)]})
    assert response.status_code == 413, response.text


async def test_what_is_wrong_with_the_second_clip_of_frames_is_told_of_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = await world.client.post(URL, json={"messages": [user(VIDEO, frames_part(b"no image"), ASK)]})
    assert (response.status_code, response.json()["error"]["param"]) == (415, "videos.1")
    assert world.leftovers == []
