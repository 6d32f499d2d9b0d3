"""Uploaded videos: visible to their owner only, kept within budgets, and deleted in time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cachetools import TTLCache
from msgspec import structs

from tests.api.uploads import ALICE, BOB, VIDEOS, as_, other_clip, upload
from tests.api.world import DATA_URL, FILE, URL, World, until
from tests.fakes import ANSWER, FakeDecodePool, FakeEngine, clip
from vidspec_models.request import GenerationRequest
from vidspec_service.api.schemas.fields import VideoFile
from vidspec_service.api.store import clip_cache
from vidspec_service.api.store.local import MIN_VIDEO_BYTES
from vidspec_service.api.store.video_store import VideoStore
from vidspec_service.decoding.clip import Clip, FrameRequest
from vidspec_service.engine.types import GenerationEvent
from vidspec_service.errors import CapacityError, DecoderLost, VideoUnreadable

pytestmark = [pytest.mark.api, pytest.mark.anyio]


async def test_list_one_and_delete(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second = await upload(world), await upload(world, other_clip(1))
    assert (await world.client.get(VIDEOS)).json()["data"] == [second, first]
    assert (await world.client.get(f"{VIDEOS}/{first['id']}")).json() == first
    gone = await world.client.delete(f"{VIDEOS}/{first['id']}")
    assert gone.json() == {"id": first["id"], "object": "video", "deleted": True}
    assert (await world.client.get(VIDEOS)).json()["data"] == [second]
    assert len(world.leftovers) == 1
    for response in (
        await world.client.get(f"{VIDEOS}/{first['id']}"),
        await world.client.delete(f"{VIDEOS}/{first['id']}"),
        await world.ask(video=None, video_id=first["id"]),
    ):
        assert (response.status_code, response.json()["error"]["param"]) == (404, "video_id")


async def test_questions_about_a_kept_video_find_its_frames(tmp_path: Path) -> None:
    world = World(tmp_path)
    kept = await upload(world)
    for _ in range(3):
        assert (await world.ask(video=None, video_id=kept["id"], fps=1)).status_code == 200
    assert len(world.decoder.requests) == 2  # one of them to know the video's facts


async def test_after_a_delete_its_frames_are_gone_too(tmp_path: Path) -> None:
    world = World(tmp_path)
    kept = await upload(world)
    await world.client.delete(f"{VIDEOS}/{kept['id']}")
    await upload(world)
    assert len(world.decoder.requests) == 2


async def test_to_look_for_a_video_that_is_not_kept_costs_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    video_id = (await world.ask()).json()["video"]["id"]
    assert (await world.client.get(f"{VIDEOS}/{video_id}")).status_code == 404
    await world.ask()
    assert len(world.decoder.requests) == 1


async def test_nobody_sees_uses_or_deletes_what_another_key_has_uploaded(tmp_path: Path) -> None:
    world = World(tmp_path, keys=[ALICE, BOB])
    kept = await upload(world, headers=as_(ALICE))
    url = f"{VIDEOS}/{kept['id']}"
    assert (await world.client.get(VIDEOS, headers=as_(BOB))).json()["data"] == []
    assert (await world.client.get(url, headers=as_(BOB))).status_code == 404
    assert (await world.client.delete(url, headers=as_(BOB))).status_code == 404
    asked = {"video_id": kept["id"], "prompt": "x"}
    assert (await world.client.post("/v1/video-chat", json=asked, headers=as_(BOB))).status_code == 404
    assert (await world.client.post("/v1/video-chat", json=asked, headers=as_(ALICE))).status_code == 200
    bobs = await upload(world, headers=as_(BOB))
    assert (bobs["id"], len(world.leftovers), len(world.decoder.requests)) == (kept["id"], 2, 2)
    await world.client.delete(url, headers=as_(BOB))
    assert (await world.client.get(url, headers=as_(ALICE))).status_code == 200


async def test_over_the_budget_the_least_recently_used_go_first(tmp_path: Path) -> None:
    world = World(tmp_path, max_stored_bytes=2 * MIN_VIDEO_BYTES)
    first, second = await upload(world), await upload(world, other_clip(1))
    await world.ask(video=None, video_id=first["id"])
    third = await upload(world, other_clip(2))
    assert [kept["id"] for kept in (await world.client.get(VIDEOS)).json()["data"]] == [third["id"], first["id"]]
    assert (await world.ask(video=None, video_id=second["id"])).status_code == 404
    assert len(world.leftovers) == 2
    await world.client.get("/metrics")
    assert (world.metric("stored_videos"), world.metric("stored_video_bytes")) == (2, 2 * MIN_VIDEO_BYTES)


async def test_a_video_that_never_fits_is_refused_and_not_kept(tmp_path: Path) -> None:
    world = World(tmp_path, max_stored_bytes=MIN_VIDEO_BYTES - 1)
    response = await world.client.post(VIDEOS, files=FILE)
    assert response.status_code == 413
    told = "The video counts for 65,536 bytes; the limit is 65,535 bytes (VIDSPEC_MAX_STORED_BYTES)."
    assert response.json()["error"]["message"] == told  # though the file has fewer
    assert world.leftovers == []


async def test_a_video_that_is_deleted_while_it_is_decoded_is_still_answered_about(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path)
    kept = await upload(world)
    world.decoder.gate = gate
    asked = asyncio.create_task(world.ask(video=None, video_id=kept["id"], fps=1))
    await until(lambda: len(world.decoder.requests) == 2)
    await world.client.delete(f"{VIDEOS}/{kept['id']}")
    assert len(world.leftovers) == 1
    gate.set()
    assert (await asked).status_code == 200
    assert world.leftovers == []


async def test_frames_that_are_decoded_after_a_delete_are_gone_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the time of the delete, a request for these frames is queued or in the decoder."""
    borrowed, borrow = list[object](), VideoStore.reading

    async def noted(*asked: Any) -> AbstractContextManager[VideoFile]:
        borrowed.append(lent := await borrow(*asked))
        return lent

    monkeypatch.setattr(VideoStore, "reading", noted)
    world = World(tmp_path, max_running_requests=1, decode_workers=1)
    kept = await upload(world)
    world.decoder.gate = asyncio.Event()
    asked = [asyncio.create_task(world.ask(video=None, video_id=kept["id"], num_frames=num)) for num in (1, 2, 3)]
    await until(lambda: len(borrowed) == 3 and len(world.decoder.requests) == 2)
    await world.client.delete(f"{VIDEOS}/{kept['id']}")
    world.decoder.gate.set()
    assert {(await each).status_code for each in asked} == {200}
    await upload(world)
    for num in (1, 2, 3):
        assert (await world.ask(video=None, video_id=kept["id"], num_frames=num)).status_code == 200
    assert len(world.decoder.requests) == 2 * 4


async def test_questions_about_a_video_that_come_together_wait_for_one_decode(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, decoder=FakeDecodePool(gate=gate), keys=[ALICE, BOB], decode_workers=8)
    question = {"video": DATA_URL, "prompt": "What moves?"}
    posts = [world.client.post(URL, json=question, headers=as_(key)) for key in (ALICE, ALICE, ALICE, BOB)]
    asked = [asyncio.create_task(post) for post in posts]
    await until(lambda: world.metric("mm_cache_queries_total") == 4 and len(world.decoder.contents) == 2)
    gate.set()
    assert {(await each).status_code for each in asked} == {200}
    assert (len(world.decoder.requests), world.metric("mm_cache_hits_total")) == (2, 2)


class FailsFirst(FakeDecodePool):
    """The first decode fails, once the gate is open."""

    def __init__(self, error: Exception | None, gate: asyncio.Event) -> None:
        super().__init__(gate=gate)
        self._first_error = error

    async def decode(self, path: Path, request: FrameRequest) -> Clip:
        decoded = await super().decode(path, request)
        if self._first_error is not None and len(self.requests) == 1:
            raise self._first_error
        return decoded


@pytest.mark.parametrize("error", [None, CapacityError("no decoder can be started"), DecoderLost("it took too long")])
async def test_who_waits_for_anothers_decode_does_not_fail_with_it(tmp_path: Path, error: Exception | None) -> None:
    """Without an error the other client leaves."""
    gate = asyncio.Event()
    world = World(tmp_path, decoder=FailsFirst(error, gate))
    first = asyncio.create_task(world.ask())
    await until(lambda: len(world.decoder.contents) == 1)
    second = asyncio.create_task(world.ask())
    await until(lambda: world.metric("mm_cache_queries_total") == 2)
    if error is None:
        first.cancel()
        await until(lambda: world.decoder.num_cancelled == 1)
    gate.set()
    assert (await second).status_code == 200
    assert error is None or (await first).status_code in (422, 503)
    assert (len(world.decoder.requests), world.leftovers) == (2, [])


async def test_questions_that_come_together_about_a_video_that_cannot_be_decoded_fail_with_one_decode(
    tmp_path: Path,
) -> None:
    """Each names the video as its own request does; who asks later tries again."""
    gate = asyncio.Event()
    world = World(tmp_path, decoder=FailsFirst(VideoUnreadable("it is damaged", param="video"), gate))
    others = {"video": None, "videos": [{"video": DATA_URL}] * 2, "num_frames": 2}
    asked = [asyncio.create_task(world.ask(**fields)) for fields in ({"num_frames": 2}, {"num_frames": 2}, others)]
    await until(lambda: world.metric("mm_cache_queries_total") == 4)
    gate.set()
    errors = [(answer.status_code, answer.json()["error"]["param"]) for answer in await asyncio.gather(*asked)]
    assert errors == [(422, "video"), (422, "video"), (422, "videos.0")]
    assert (len(world.decoder.requests), world.leftovers) == (1, [])
    assert (await world.ask(num_frames=2)).status_code == 200


@pytest.mark.parametrize(("budget", "num_decodes"), [(0, 2), (3 * 2**20 - 1, 2), (3 * 2**20, 1)])
async def test_frames_in_memory_have_a_budget(tmp_path: Path, budget: int, num_decodes: int) -> None:
    class Large(FakeDecodePool):
        async def decode(self, path: Path, request: FrameRequest) -> Clip:
            decoded = await super().decode(path, request)
            frames = np.zeros((3, 1024, 1024), np.uint8)
            return structs.replace(decoded, video=replace(decoded.video, frames=frames))

    world = World(tmp_path, decoder=Large(), max_cached_frame_bytes=budget)
    assert [(await world.ask()).status_code for _ in range(2)] == [200, 200]
    assert len(world.decoder.requests) == num_decodes


async def test_frames_in_memory_stay_as_long_as_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0
    monkeypatch.setattr(clip_cache, "TTLCache", partial(TTLCache, timer=lambda: now))
    world = World(tmp_path, video_ttl_s=60)
    for now in (0, 50, 100):  # noqa: B007  the cache's clock
        await world.ask()
    assert len(world.decoder.requests) == 1


async def test_frames_that_are_too_old_leave_the_memory_though_nobody_asks_and_an_answer_about_them_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(FakeEngine):
        """Holds no frames, as the real one, whose workers have them."""

        async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
            request = replace(request, videos=())
            async for event in super().generate(request):
                yield event

    class Watched(FakeDecodePool):
        async def decode(self, path: Path, request: FrameRequest) -> Clip:
            decoded = await super().decode(path, request)
            weakref.finalize(decoded.video.frames, freed.append, request)
            return decoded

    now, freed = 0, list[FrameRequest]()
    monkeypatch.setattr(clip_cache, "TTLCache", partial(TTLCache, timer=lambda: now))
    gate = asyncio.Event()
    world = World(tmp_path, Forgetful(*ANSWER[:2], gate, *ANSWER[2:]), Watched(), video_ttl_s=60)
    asking = asyncio.create_task(world.ask())
    await until(lambda: world.engine.num_held == 1)
    gc.collect()
    for now, num_freed in ((59, 0), (61, 1)):  # noqa: B007  the cache's clock
        world.services.clips.expire()
        assert len(freed) == num_freed
    gate.set()
    assert (await asking).status_code == 200


async def test_small_clips_are_counted_so_that_their_number_is_bounded_too(tmp_path: Path) -> None:
    world = World(tmp_path, max_cached_frame_bytes=2 * clip_cache.MIN_CLIP_BYTES)
    for num_frames in (1, 2, 3, 1):
        await world.ask(num_frames=num_frames)
    assert [request.num_frames for request in world.decoder.requests] == [1, 2, 3, 1]


async def test_kept_frames_go_before_anybody_is_refused_for_want_of_descriptors(tmp_path: Path) -> None:
    class Exhausted(FakeDecodePool):
        """Runs out of file descriptors until the first clip is released."""

        async def decode(self, path: Path, request: FrameRequest) -> Clip:
            self.requests.append(request)
            if len(self.requests) == 2:
                raise CapacityError("no decoder can be started")
            return clip()

    world = World(tmp_path, decoder=Exhausted())
    for num_frames in (1, 2):
        assert (await world.ask(num_frames=num_frames)).status_code == 200
    assert len(world.decoder.requests) == 3
    assert (await world.ask(num_frames=1)).status_code == 200
    assert len(world.decoder.requests) == 4  # the frames of the first clip are no longer cached


async def test_a_decoder_that_cannot_start_is_not_asked_twice_if_there_is_nothing_to_drop(tmp_path: Path) -> None:
    world = World(tmp_path, decoder=FakeDecodePool(CapacityError("no decoder can be started")))
    assert (await world.ask()).status_code == 503
    assert len(world.decoder.requests) == 1
