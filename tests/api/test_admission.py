"""A request is admitted before any work is done for it, or is refused at once if there is no place for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.test_limits import FORM, part, video
from tests.api.test_stream import events_of
from tests.api.uploads import ALICE, BOB, as_
from tests.api.world import DATA_URL, FILE, PATIENCE_S, URL, World, hold_deadlines, until
from tests.fakes import ANSWER, FINISHED, FakeDecodePool, FakeEngine
from vidspec_service.api import middleware
from vidspec_service.api.errors import TooManyRequests
from vidspec_service.api.uploads import upload as upload_module
from vidspec_service.errors import CapacityError, Draining, QueueFull

pytestmark = [pytest.mark.api, pytest.mark.anyio]


async def test_a_full_server_says_so_before_it_reads_or_decodes(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, decoder=FakeDecodePool(gate=gate), max_running_requests=1, max_queued_requests=1)
    inside = [asyncio.create_task(world.ask()) for _ in range(2)]
    await until(lambda: world.admission.num_admitted == 2)
    response = await world.client.post(URL, files=FILE, data={"nonsense": "x"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "queue_full")
    assert world.metric("admission_rejections_total", reason="queue_full") == 1
    await world.client.get("/metrics")
    assert world.metric("num_requests_waiting") == 2
    gate.set()
    assert [(await task).status_code for task in inside] == [200, 200]
    assert len(world.decoder.requests) <= len(inside)  # both send the same file: one decode may serve both
    assert (await world.ask()).status_code == 200


def test_a_request_that_finds_no_place_is_none_of_those_of_its_minute(tmp_path: Path) -> None:
    admission = World(
        tmp_path, max_running_requests=1, max_queued_requests=0, requests_per_minute_per_key=2
    ).admission  # fmt: skip
    with admission.permit("a", "a"), pytest.raises(QueueFull), admission.permit("a", "a"):
        pass
    with admission.permit("a", "a"):
        pass
    with pytest.raises(TooManyRequests), admission.permit("a", "a"):
        pass


@pytest.mark.parametrize(
    "limits", [{}, {"max_requests_per_key": 5}, {"keys": [ALICE]}, {"keys": [ALICE], "max_requests_per_key": 5}]
)
def test_a_lone_request_gets_as_many_places_as_it_may_ask_for_and_no_more(
    tmp_path: Path, limits: dict[str, Any]
) -> None:
    admission = World(tmp_path, max_running_requests=4, max_queued_requests=12, **limits).admission
    with admission.permit("a", "a") as permit:
        permit.hold_places(admission.max_places)
        with pytest.raises(CapacityError):
            permit.hold_places(admission.max_places + 1)


def test_the_server_is_idle_once_the_last_request_has_left(tmp_path: Path) -> None:
    admission = World(tmp_path).admission
    with admission.permit("a", "a"):
        with admission.permit("b", "b"):
            pass
        assert not admission.idle.is_set()
    assert admission.idle.is_set()


async def test_every_way_out_gives_the_place_back(tmp_path: Path) -> None:
    world = World(tmp_path, max_running_requests=1, max_queued_requests=0)
    for fields in ({}, {"stream": True}, {"prompt": None}, {"fps": 0}, {"video_id": "x"}) * 2:
        await world.ask(**fields)
        assert world.admission.num_admitted == 0
    assert (await world.ask()).status_code == 200


async def test_a_streamed_answer_keeps_its_place_until_its_last_byte(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, FakeEngine(*ANSWER[:2], gate, *ANSWER[2:]))
    streamed = asyncio.create_task(world.ask(stream=True))
    await until(lambda: world.admission.num_admitted == 1)
    await until(lambda: not world.leftovers and not world.admission.num_bytes)  # decoded: the file is no longer needed
    assert world.admission.num_admitted == 1
    gate.set()
    assert (await streamed).status_code == 200
    assert (world.admission.num_admitted, world.leftovers) == (0, [])


async def test_an_engine_that_is_not_ready_is_a_503_that_tells_no_secrets(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(is_ready=False))
    response = await world.ask()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "10"
    error = response.json()["error"]
    assert error["code"] == "engine_dead"
    assert "secret" not in error["message"]
    assert world.decoder.requests == []


async def test_a_draining_server_finishes_what_runs_and_admits_nothing(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, FakeEngine(*ANSWER[:2], gate, *ANSWER[2:]))
    running = asyncio.create_task(world.ask(stream=True))
    await until(lambda: world.admission.num_admitted == 1)
    world.admission.start_draining()
    refused = await world.ask()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert refused.headers["retry-after"] == "1"
    idle = asyncio.create_task(world.admission.idle.wait())
    await asyncio.sleep(0.01)
    assert not idle.done()
    gate.set()
    assert events_of((await running).text)[-1] == "[DONE]"
    await asyncio.wait_for(idle, PATIENCE_S)


async def test_when_the_drain_is_over_streams_get_an_error_event_and_others_a_503(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER[:2], asyncio.Event()))
    streamed = asyncio.create_task(world.ask(stream=True))
    whole = asyncio.create_task(world.ask())
    await until(lambda: len(world.engine.requests) == 2)
    await asyncio.sleep(0.05)
    world.admission.close()
    events = events_of((await streamed).text)
    assert events[-2]["error"]["code"] == Draining.code
    assert (await whole).status_code == 503
    assert len(world.engine.cancelled) == 2
    await asyncio.wait_for(world.admission.idle.wait(), PATIENCE_S)
    assert world.leftovers == []


async def test_closing_ends_a_decode_too(tmp_path: Path) -> None:
    world = World(tmp_path, decoder=FakeDecodePool(gate=asyncio.Event()))
    waiting = asyncio.create_task(world.ask())
    await until(lambda: len(world.decoder.contents) == 1)
    world.admission.close()
    assert (await waiting).status_code == 503
    assert world.decoder.num_cancelled == 1


async def test_sixteen_at_once_are_all_answered_and_none_mixed_up(tmp_path: Path) -> None:
    world = World(tmp_path)
    answers = await asyncio.gather(*(world.ask(prompt=f"q{index}", stream=index % 2 == 0) for index in range(16)))
    assert [answer.status_code for answer in answers] == [200] * 16
    assert sorted(request.turns[0].text for request in world.engine.requests) == sorted(
        f"q{index}" for index in range(16)
    )
    assert world.admission.num_admitted == 0


BODY = {"video": DATA_URL, "prompt": "x"}


async def ask_as(world: World, key: str) -> httpx.Response:
    return await world.client.post(URL, json=BODY, headers=as_(key))


async def test_a_key_may_have_so_many_requests_under_way_whatever_others_do(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, decoder=FakeDecodePool(gate=gate), keys=[ALICE, BOB], max_requests_per_key=2)
    inside = [asyncio.create_task(ask_as(world, ALICE)) for _ in range(2)]
    await until(lambda: world.admission.num_admitted == 2)
    refused = await ask_as(world, ALICE)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limited")
    assert "VIDSPEC_MAX_REQUESTS_PER_KEY" in error["message"]
    inside.append(asyncio.create_task(ask_as(world, BOB)))
    await until(lambda: world.admission.num_admitted == 3)
    gate.set()
    assert [(await task).status_code for task in inside] == [200] * 3
    assert (await ask_as(world, ALICE)).status_code == 200
    assert world.metric("admission_rejections_total", reason="rate_limited") == 1


async def test_a_key_may_send_so_many_requests_a_minute_and_is_told_when_to_come_back(tmp_path: Path) -> None:
    world = World(tmp_path, keys=[ALICE, BOB], requests_per_minute_per_key=2)
    answers = [await ask_as(world, ALICE) for _ in "abc"]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 25 <= int(answers[-1].headers["retry-after"]) <= 30
    assert (await world.client.post("/v1/videos", files=FILE, headers=as_(ALICE))).status_code == 429
    assert (await world.client.get("/v1/videos", headers=as_(ALICE))).status_code == 200
    assert (await world.client.post("/v1/videos", files=FILE, headers=as_(BOB))).status_code == 200


@pytest.mark.parametrize("limit", ["requests_per_minute_per_key", "max_requests_per_key"])
async def test_without_keys_all_callers_are_one(tmp_path: Path, limit: str) -> None:
    gate = asyncio.Event()
    limits: dict[str, Any] = {limit: 1}
    world = World(tmp_path, decoder=FakeDecodePool(gate=gate), **limits)
    first = asyncio.create_task(world.ask())
    await until(lambda: world.admission.num_admitted == 1)
    async with asyncio.timeout(PATIENCE_S):
        assert (await world.ask()).status_code == 429
    gate.set()
    assert (await first).status_code == 200


async def test_one_key_never_takes_the_last_places_from_the_others(tmp_path: Path) -> None:
    gate = asyncio.Event()
    decoder = FakeDecodePool(gate=gate)
    world = World(tmp_path, decoder=decoder, keys=[ALICE, BOB], max_running_requests=4, max_queued_requests=4)
    inside = [asyncio.create_task(ask_as(world, ALICE)) for _ in range(20)]
    await until(lambda: world.admission.num_admitted == 6)
    inside += [asyncio.create_task(ask_as(world, BOB)) for _ in range(2)]
    await until(lambda: world.admission.num_admitted == 8)
    assert (await ask_as(world, BOB)).status_code == 503
    gate.set()
    answers = [await task for task in inside]
    assert [answer.status_code for answer in answers].count(200) == 8
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 14
    assert refused[0].headers["retry-after"] == "1"
    assert "free places are for other callers" in refused[0].json()["error"]["message"]


async def test_one_key_never_takes_the_last_slot_from_the_others(tmp_path: Path) -> None:
    gate = asyncio.Event()
    engine = FakeEngine(*ANSWER[:2], gate, *ANSWER[2:])
    world = World(tmp_path, engine, keys=[ALICE, BOB], max_running_requests=3, decode_workers=1)
    inside = [asyncio.create_task(ask_as(world, ALICE)) for _ in range(4)]
    await until(lambda: engine.num_held == 3)
    inside.append(asyncio.create_task(ask_as(world, BOB)))
    await until(lambda: engine.num_held == 4)
    assert len({request.caller for request in engine.requests}) == 2
    gate.set()
    assert {(await task).status_code for task in inside} == {200}


async def test_an_only_key_may_take_every_place(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(
        tmp_path, decoder=FakeDecodePool(gate=gate), keys=[ALICE], max_running_requests=4, max_queued_requests=4
    )
    inside = [asyncio.create_task(ask_as(world, ALICE)) for _ in range(9)]
    await until(lambda: world.admission.num_admitted == 8)
    gate.set()
    assert sorted([(await task).status_code for task in inside]) == [200] * 8 + [503]


async def test_when_it_is_busy_the_callers_are_served_in_rotation(tmp_path: Path, in_line: list[str]) -> None:
    gate = asyncio.Event()
    world = World(
        tmp_path, decoder=FakeDecodePool(gate=gate), keys=[ALICE, BOB], max_running_requests=1, decode_workers=1
    )  # fmt: skip
    asked, began = [], time.monotonic()
    for number, key in enumerate([ALICE] * 6 + [BOB] * 2):
        body = {**BODY, "num_frames": number + 1}
        asked.append(asyncio.create_task(world.client.post(URL, json=body, headers=as_(key))))
        await until(lambda: len(world.decoder.requests) + len(in_line) == len(asked))  # it has a slot or waits for one
    gate.set()
    answers = await asyncio.gather(*asked)
    took_s = time.monotonic() - began
    assert {answer.status_code for answer in answers} == {200}
    assert [request.num_frames for request in world.decoder.requests] == [1, 2, 3, 7, 4, 8, 5, 6]
    longest_s = max(answer.json()["timings"]["queue_s"] for answer in answers)
    assert FINISHED.queue_s < longest_s < took_s + FINISHED.queue_s


@pytest.mark.parametrize("what", ["turn", "decoder"])
async def test_the_wait_for_a_slot_counts_against_the_deadline_and_can_be_left(
    tmp_path: Path, in_line: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The slots do not come free before the end, so whoever had not waited all the time would wait still."""
    world = World(tmp_path, max_running_requests=4, decode_workers=1, request_timeout_s=0.1)
    slots, holders = (world.services.queue, "aaaaa") if what == "turn" else (world.services.clips._decoders, "ab")
    for holder in holders:
        await slots.acquire(holder)
    hold_deadlines(monkeypatch, until=lambda: len(in_line) == 5)
    # Each request asks for other frames, so that none can use another's decoded frames.
    asked = [world.ask(num_frames=4 + index) for index in range(4)]
    answers = await asyncio.gather(*asked, world.client.post("/v1/videos", files=FILE))
    assert [answer.status_code for answer in answers] == [504] * 5
    assert world.decoder.requests == []
    assert (in_line, world.admission.num_admitted, world.leftovers) == ([], 0, [])
    for holder in holders:
        slots.release(holder)
    for holder in holders:
        async with asyncio.timeout(PATIENCE_S):
            await slots.acquire(f"the next {holder}")


async def test_videos_of_one_key_that_take_long_to_decode_do_not_hold_up_those_of_another(tmp_path: Path) -> None:
    """Two GIFs of half a megabyte had every decoder for a minute."""
    gate = asyncio.Event()
    world = World(tmp_path, decoder=FakeDecodePool(gate=gate), keys=[ALICE, BOB], decode_workers=2)
    asked = [
        asyncio.create_task(world.client.post(URL, json={**BODY, "num_frames": number}, headers=as_(key)))
        for number, key in enumerate([ALICE, ALICE, ALICE, BOB], 1)
    ]
    await until(lambda: len(world.decoder.requests) == 3)
    assert 4 in [request.num_frames for request in world.decoder.requests]
    gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}


async def test_bodies_have_a_budget_together(tmp_path: Path) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, decoder=FakeDecodePool(gate=gate), max_queued_bytes=2000)
    body = part("prompt", b"x") + part("video", video(1200), "a.mp4") + b"--XX--\r\n"
    first = asyncio.create_task(world.client.post(URL, content=body, headers=FORM))
    await until(lambda: len(world.decoder.requests) == 1)
    assert world.admission.num_bytes == len(body)
    refused = await world.client.post(URL, content=body, headers=FORM)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
    assert "VIDSPEC_MAX_QUEUED_BYTES" in refused.json()["error"]["message"]

    async def undeclared() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    # Sent in pieces, the body exceeds the client's share before it exceeds the budget.
    assert (await world.client.post(URL, content=undeclared(), headers=FORM)).status_code == 429
    assert len(world.leftovers) == 1
    gate.set()
    assert (await first).status_code == 200
    assert (world.admission.num_bytes, world.leftovers) == (0, [])
    assert (await world.client.post(URL, content=undeclared(), headers=FORM)).status_code == 200


async def test_one_key_never_takes_the_last_bytes_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.05)
    gate = asyncio.Event()
    world = World(tmp_path, keys=[ALICE, BOB], max_queued_bytes=4000)

    async def stalled() -> AsyncIterator[bytes]:
        yield part("video", video(2000), "a.mp4")[:1000]
        await gate.wait()

    async def announce(key: str) -> httpx.Response:
        return await world.client.post(URL, content=stalled(), headers={**FORM, **as_(key)})

    stalling = []
    for _ in range(3):
        stalling.append(asyncio.create_task(announce(ALICE)))
        await until(lambda: world.admission.num_bytes == 1000 * len(stalling))
    refused = await announce(ALICE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
    body = part("prompt", b"x") + part("video", video(600), "a.mp4") + b"--XX--\r\n"
    assert (await world.client.post(URL, content=body, headers={**FORM, **as_(BOB)})).status_code == 200
    gate.set()
    assert [response.status_code for response in await asyncio.gather(*stalling)] == [400] * 3
    assert world.admission.num_bytes == 0


async def test_one_body_alone_may_be_as_large_as_bodies_may_be(tmp_path: Path) -> None:
    world = World(tmp_path, max_queued_bytes=10)
    assert (await world.ask()).status_code == 200
    assert (await world.ask_form()).status_code == 200
    assert world.admission.num_bytes == 0


async def idle_body() -> AsyncIterator[bytes]:
    """The body of a client that announces much and sends nothing."""
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize(("keys", "num_bodies"), [([], 3), ([ALICE], 4)])
def test_of_bodies_that_grow_side_by_side_only_those_beyond_the_room_are_refused(
    tmp_path: Path, keys: list[str], num_bodies: int
) -> None:
    """One of several callers, as addresses are, may hold three quarters of the budget; an only key all of it."""
    admission = World(tmp_path, keys=keys, max_queued_bytes=4000).admission
    with ExitStack() as held:
        growing = [held.enter_context(admission.permit("", "10.0.0.1")) for _ in range(10)]
        for total in range(100, 1001, 100):
            for permit in list(growing):
                try:
                    permit.hold_bytes(total)
                except CapacityError:
                    growing.remove(permit)
        assert len(growing) == num_bodies
        assert admission.num_bytes == num_bodies * 1000


async def test_what_is_only_announced_takes_no_bytes_from_anybody(tmp_path: Path) -> None:
    world = World(tmp_path, max_queued_bytes=1000)
    headers = {**FORM, "content-length": "999999"}
    idle = [asyncio.create_task(world.client.post(URL, content=idle_body(), headers=headers)) for _ in range(4)]
    await until(lambda: world.admission.num_admitted == 4)
    assert (await world.ask_form()).status_code == 200
    for task in idle:
        task.cancel()
    await asyncio.gather(*idle, return_exceptions=True)


async def test_a_body_that_hardly_arrives_gives_its_place_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_module, "GRACE_S", 0.05)
    monkeypatch.setattr(middleware, "LINGER_S", 0.05)
    world = World(tmp_path)

    async def dripping() -> AsyncIterator[bytes]:
        for byte in part("prompt", b"x" * 1000):
            yield bytes([byte])
            await asyncio.sleep(0.01)

    response = await world.client.post(URL, content=dripping(), headers=FORM)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "upload_timeout")
    assert world.admission.num_admitted == 0
    assert (await world.ask_form()).status_code == 200


@pytest.mark.parametrize(
    ("ours", "others"),
    [
        (["203.0.113.1", "::ffff:203.0.113.1"], "203.0.113.2"),
        (["2001:db8::1", "2001:db8::ffff:0:0:3"], "2001:db8:0:1::1"),
    ],
)
async def test_without_keys_one_address_leaves_places_for_others_and_so_does_one_network_of_ipv6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: list[str], others: str
) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.01)
    world = World(tmp_path, max_running_requests=4, max_queued_requests=12)

    def client_at(address: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(world.app, client=(address, 9)), base_url="http://test")

    greedy, modest = [client_at(address) for address in ours], client_at(others)
    idle = [asyncio.create_task(greedy[at % 2].post(URL, content=idle_body(), headers=FORM)) for at in range(20)]
    await until(lambda: sum(task.done() for task in idle) == 8)
    assert {task.result().status_code for task in idle if task.done()} == {429}
    waiting = [task for task in idle if not task.done()]
    assert len(waiting) == 12  # of 16
    assert (await modest.post(URL, json={"prompt": "x"})).status_code == 200
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
