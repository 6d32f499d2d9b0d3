"""Sizes and shapes of bodies: every limit holds, however it is exceeded, and no file is left behind."""

from __future__ import annotations

import asyncio
import base64
import random
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from tests.api.world import CLIP_BYTES, DATA_URL, FILE, URL, World, until
from tests.fakes import ANSWER, FakeDecodePool, FakeEngine
from vidspec_service.api import app, middleware
from vidspec_service.api.middleware import LINGER_BYTES, BodyLimit
from vidspec_service.api.uploads.form import MAX_FIELD_BYTES, MAX_PARTS, OVERHEAD_BYTES, MultipartReader
from vidspec_service.api.uploads.json_body import MAX_TEXT_BYTES
from vidspec_service.decoding.clip import Clip, FrameRequest
from vidspec_service.errors import InvalidRequest

pytestmark = [pytest.mark.api, pytest.mark.anyio]

FORM = {"content-type": "multipart/form-data; boundary=XX"}
JSON = {"content-type": "application/json"}


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    """One part of a form with the boundary XX."""
    suffix = f'; filename="{filename}"' if filename is not None else ""
    return f'--XX\r\ncontent-disposition: form-data; name="{name}"{suffix}\r\n\r\n'.encode() + content + b"\r\n"


def video(num_bytes: int) -> bytes:
    """`num_bytes` bytes that begin like an MP4 file."""
    return CLIP_BYTES[:12].ljust(num_bytes, b"v")


async def in_pieces(content: bytes, size: int) -> AsyncIterator[bytes]:
    """A body of unknown length."""
    for start in range(0, len(content), size):
        yield content[start : start + size]


def assert_too_large(response_json: dict[str, dict[str, str]], setting: str) -> None:
    assert response_json["error"]["code"] == "video_too_large"
    assert setting in response_json["error"]["message"]


async def test_a_body_declared_too_large_is_refused_unread(tmp_path: Path) -> None:
    world = World(tmp_path, max_upload_bytes=1000, max_json_bytes=1000)
    headers = {**FORM, "content-length": str(1001 + OVERHEAD_BYTES)}
    response = await world.client.post(URL, content=b"", headers=headers)
    assert response.status_code == 413
    assert_too_large(response.json(), "VIDSPEC_MAX_UPLOAD_BYTES")
    assert response.headers["x-request-id"]


async def test_a_file_over_the_limit_is_refused_while_it_arrives(tmp_path: Path) -> None:
    world = World(tmp_path, max_upload_bytes=1000, max_json_bytes=1000)
    body = part("prompt", b"x") + part("video", video(1001), "a.mp4") + b"--XX--\r\n"
    response = await world.client.post(URL, content=in_pieces(body, 100), headers=FORM)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "video_too_large"
    assert world.leftovers == []


async def test_a_file_at_the_limit_is_taken(tmp_path: Path) -> None:
    world = World(tmp_path, max_upload_bytes=1000, max_json_bytes=1000)
    body = part("prompt", b"x") + part("video", video(1000), "a.mp4") + b"--XX--\r\n"
    response = await world.client.post(URL, content=in_pieces(body, 7), headers=FORM)
    assert response.status_code == 200, response.text
    assert world.decoder.contents == [video(1000)]


async def test_an_endless_body_is_cut_off(tmp_path: Path) -> None:
    world = World(tmp_path, max_upload_bytes=1000, max_json_bytes=1000)
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        yield part("video", video(32), "a.mp4")[:-2]
        while True:
            num_sent += 1
            yield b"v" * 65536

    response = await world.client.post(URL, content=endless(), headers=FORM)
    assert response.status_code == 413
    assert num_sent * 65536 < LINGER_BYTES + 2 * OVERHEAD_BYTES
    assert world.leftovers == []


async def test_a_body_within_the_limits_is_read_to_its_end_after_an_early_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the kernel would reset the connection, and a client that sends a large file would not see why."""
    monkeypatch.setattr(middleware, "LINGER_BYTES", 100)
    world = World(tmp_path, keys=["a-key-0123456789abcdef"], max_upload_bytes=10_000)
    num_sent = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal num_sent
        async for piece in in_pieces(video(10_000), 100):
            num_sent += len(piece)
            yield piece

    response = await world.client.post(URL, content=counted(), headers=FORM)
    assert (response.status_code, num_sent) == (401, 10_000)


async def test_what_follows_the_form_counts_too(tmp_path: Path) -> None:
    world = World(tmp_path, max_upload_bytes=1000, max_json_bytes=1000)
    body = part("prompt", b"x") + part("video", video(32), "a.mp4") + b"--XX--\r\n" + b"e" * (OVERHEAD_BYTES + 2000)
    response = await world.client.post(URL, content=in_pieces(body, 65536), headers=FORM)
    assert response.status_code == 413
    assert world.leftovers == []


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_may_have_as_many_bytes_as_are_allowed_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_declared: bool
) -> None:
    monkeypatch.setattr(app, "OVERHEAD_BYTES", 0)
    body = b'{"prompt": "x"}'
    for most, status in ((len(body), 200), (len(body) - 1, 413)):
        world = World(tmp_path, max_upload_bytes=1, max_json_bytes=most)
        content = body if is_declared else in_pieces(body, 4)
        response = await world.client.post(URL, content=content, headers=JSON)
        assert response.status_code == status, response.text


async def test_a_json_body_has_its_own_limit(tmp_path: Path) -> None:
    world = World(tmp_path, max_json_bytes=100)
    body = b'{"video": "' + DATA_URL.encode() + b" " * 100
    response = await world.client.post(URL, content=in_pieces(body, 64), headers=JSON)
    assert response.status_code == 413
    assert_too_large(response.json(), "VIDSPEC_MAX_JSON_BYTES")


async def test_a_data_url_is_held_to_the_upload_limit(tmp_path: Path) -> None:
    world = World(tmp_path, max_upload_bytes=10)
    response = await world.ask()
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "video_too_large"
    assert world.leftovers == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--XX",
        b"--YY\r\n",
        b"no form at all",
        part("prompt", b"x"),
        part("prompt", b"x") + part("video", video(500), "a.mp4"),
        part("prompt", b"x") + b"--XX\r\ncontent-disposition: form-data\r\n\r\nx\r\n--XX--",
        part("prompt", b"x") * (MAX_PARTS + 1) + b"--XX--",
        b"".join(part("stop", b"x") for _ in range(MAX_PARTS + 1)) + b"--XX--",
        part("prompt", b"x").replace(b"\r\n\r\n", b"\r\nx-header: " + b"h" * 100_000 + b"\r\n\r\n") + b"--XX--\r\n",
        b"--XX\r\nbad header\r\n\r\nx\r\n--XX--",
    ],
)
@pytest.mark.parametrize("size", [1 << 16, 1000])
async def test_a_broken_form_is_a_400(tmp_path: Path, body: bytes, size: int) -> None:
    world = World(tmp_path)
    response = await world.client.post(URL, content=in_pieces(body, size), headers=FORM)
    assert response.status_code == 400, response.text
    assert world.leftovers == []


async def num_parts_read(body: bytes) -> int:
    reader, num_parts = MultipartReader(in_pieces(body, 1000), FORM["content-type"]), 0
    while await reader.next_part() is not None:
        assert await reader.text("stop") == "x"
        num_parts += 1
    return num_parts


async def test_a_form_may_have_as_many_parts_as_are_allowed_and_no_more() -> None:
    assert await num_parts_read(part("stop", b"x") * MAX_PARTS + b"--XX--") == MAX_PARTS
    with pytest.raises(InvalidRequest):
        await num_parts_read(part("stop", b"x") * (MAX_PARTS + 1) + b"--XX--")


async def test_a_part_without_a_name_does_not_get_that_of_the_part_before() -> None:
    with pytest.raises(InvalidRequest):
        await num_parts_read(part("stop", b"x") + b"--XX\r\nx-header: y\r\n\r\nx\r\n--XX--")


async def test_each_header_of_a_part_is_read_for_itself(tmp_path: Path) -> None:
    headers = b'content-type: text/plain; filename=a\r\ncontent-disposition: form-data; name="video"'
    body = b"--XX\r\n" + headers + b"\r\n\r\n" + CLIP_BYTES + b"\r\n--XX--"
    world = World(tmp_path)
    world.assert_refused(await world.client.post(URL, content=body, headers=FORM), "video", "must be a file part")


async def test_a_field_is_read_no_further_than_its_limit() -> None:
    pieces = in_pieces(part("messages", b"x" * 3 * MAX_FIELD_BYTES) + b"--XX--", 65536)
    reader = MultipartReader(pieces, FORM["content-type"])
    await reader.next_part()
    with pytest.raises(InvalidRequest):
        await reader.text("messages")
    assert await anext(pieces), "the rest was not read"
    longest = MultipartReader(in_pieces(part("x", b"x" * MAX_FIELD_BYTES) + b"--XX--", 65536), FORM["content-type"])
    await longest.next_part()
    assert len(await longest.text("x")) == MAX_FIELD_BYTES


@pytest.mark.parametrize("boundary", ["", "; boundary=", "; boundary=" + "b" * 1000])
async def test_a_boundary_is_required_and_bounded(tmp_path: Path, boundary: str) -> None:
    headers = {"content-type": "multipart/form-data" + boundary}
    response = await World(tmp_path).client.post(URL, content=b"x", headers=headers)
    assert response.status_code == 400


async def test_a_file_whose_only_name_is_in_the_extended_form_is_a_file(tmp_path: Path) -> None:
    file = part("video", CLIP_BYTES, "a.mp4").replace(b'filename="a.mp4"', b"filename*=UTF-8''%C3%A4.mp4")
    body = part("prompt", b"x") + file + b"--XX--"
    response = await World(tmp_path).client.post(URL, content=body, headers=FORM)
    assert response.status_code == 200, response.text


async def test_the_clients_file_name_is_never_used(tmp_path: Path) -> None:
    seen: list[str] = []

    class Spy(FakeDecodePool):
        async def decode(self, path: Path, request: FrameRequest) -> Clip:
            seen.append(path.name)
            return await super().decode(path, request)

    world = World(tmp_path, decoder=Spy())
    assert FILE["video"][0] == "../../etc/passwd.m3u8"
    await world.ask_form()
    assert "passwd" not in seen[0]
    assert "m3u8" not in seen[0]


async def test_a_file_that_somebody_has_cleared_away_after_its_decode_is_no_error(tmp_path: Path) -> None:
    class Clearing(FakeDecodePool):
        async def decode(self, path: Path, request: FrameRequest) -> Clip:
            clip = await super().decode(path, request)
            await asyncio.to_thread(path.unlink)
            return clip

    assert (await World(tmp_path, decoder=Clearing()).ask()).status_code == 200


async def test_a_body_that_does_not_arrive_in_time_is_a_408(tmp_path: Path) -> None:
    world = World(tmp_path, upload_timeout_s=0.05)

    async def stalled() -> AsyncIterator[bytes]:
        yield part("prompt", b"x") + part("video", video(500), "a.mp4")
        await asyncio.sleep(0.3)

    response = await world.client.post(URL, content=stalled(), headers=FORM)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "upload_timeout"
    assert world.leftovers == []
    assert world.admission.num_admitted == 0


async def test_a_data_url_may_be_as_large_as_json_may_be(tmp_path: Path) -> None:
    world = World(tmp_path, max_upload_bytes=OVERHEAD_BYTES * 5)
    content = video(OVERHEAD_BYTES * 5)
    response = await world.ask(video=f"data:video/mp4;base64,{base64.b64encode(content).decode()}")
    assert response.status_code == 200, response.text
    assert world.decoder.contents == [content]


@pytest.mark.parametrize("num_bytes", [6_000_000, MAX_TEXT_BYTES // 2])
async def test_nothing_of_a_body_is_in_memory_while_its_answer_is_generated(tmp_path: Path, num_bytes: int) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, FakeEngine(*ANSWER[:2], gate, *ANSWER[2:]))
    video_url = f"data:video/mp4;base64,{base64.b64encode(video(num_bytes)).decode()}"
    body = f'{{"video": "{video_url}", "prompt": "x"}}'.encode()
    tracemalloc.start()
    try:
        asking = asyncio.create_task(world.client.post(URL, content=body, headers=JSON))
        await until(lambda: world.engine.num_held == 1)
        world.decoder.contents.clear()  # the file as the decoder has read it
        await until(lambda: tracemalloc.get_traced_memory()[0] < len(body) / 4)  # the thread lets go of it, too
    finally:
        tracemalloc.stop()
    gate.set()
    assert (await asking).status_code == 200


async def test_no_mutation_of_a_body_gets_a_5xx_or_leaves_a_file(tmp_path: Path) -> None:
    world = World(tmp_path)
    draw = random.Random(7)
    form = part("prompt", b"x") + part("num_frames", b"3") + part("video", video(40), "a.mp4") + b"--XX--\r\n"
    json_body = f'{{"video": "{DATA_URL}", "prompt": "x", "stop": ["a"], "fps": 2}}'.encode()
    statuses = set()
    for number in range(400):
        body = bytearray(form if number % 2 else json_body)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(body))
            body[place : place + draw.randint(0, 9)] = draw.randbytes(draw.randint(0, 9))
        headers = FORM if number % 2 else JSON
        response = await world.client.post(URL, content=in_pieces(bytes(body), draw.randint(1, 99)), headers=headers)
        statuses.add(response.status_code)
    assert {200, 400, 415} <= statuses <= {200, 400, 413, 415, 422}
    assert (world.admission.num_admitted, world.leftovers) == (0, [])


async def test_a_server_that_ends_leaves_a_refused_client_in_order() -> None:
    """Cancelled while the rest of a body is discarded, the server still completes its answer and raises nothing."""
    sent: list[Message] = []
    is_answered = asyncio.Event()

    async def receive() -> Message:
        is_answered.set()
        return await asyncio.Future()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"content-length", b"1000")]}
    serving = asyncio.create_task(BodyLimit(PlainTextResponse("no", 401), 10_000)(scope, receive, send))
    await is_answered.wait()
    serving.cancel()
    await serving
    assert [message.get("more_body") for message in sent] == [None, True, False]
