"""A client that disconnects stops the work done for it, in every phase, without effect on other clients."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.world import DATA_URL, PATIENCE_S, World, hold_deadlines, until
from tests.fakes import ANSWER, FakeDecodePool, FakeEngine
from vidspec_service.api.generate import streaming
from vidspec_service.api.routes import page
from vidspec_service.api.routes.page import SampleClip

pytestmark = [pytest.mark.api, pytest.mark.anyio]


class LeavingClient:
    """Speaks ASGI to the application, sends its body, and disconnects when told to."""

    def __init__(
        self, world: World, body: bytes, *, is_whole: bool = True, method: str = "POST", path: str = "/v1/video-chat"
    ) -> None:
        self._world = world
        self._method, self._path = method, path
        self._messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": not is_whole}]
        self.left = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def start(self) -> asyncio.Task[None]:
        headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": self._method, "scheme": "http",
            "path": self._path, "raw_path": self._path.encode(), "query_string": b"", "root_path": "",
            "headers": headers, "server": ("test", 80), "client": ("test", 1),
        }  # fmt: skip
        return asyncio.ensure_future(self._world.app(scope, self.receive, self.send))

    async def leave_when(self, condition: Callable[[], bool]) -> None:
        """Send the request and disconnect once `condition` holds; the server has to notice."""
        running = self.start()
        await until(condition)
        self.left.set()
        await asyncio.wait_for(running, PATIENCE_S)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def body(**fields: Any) -> bytes:
    return json.dumps({"video": DATA_URL, "prompt": "x", **fields}).encode()


async def test_leaving_a_stream_closes_the_engines_generator(tmp_path: Path, log: io.StringIO) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER[:2], asyncio.Event()))
    client = LeavingClient(world, body(stream=True))
    running = client.start()
    await until(lambda: "A red" in client.text)
    assert world.engine.cancelled == []
    client.left.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert world.engine.cancelled == [world.engine.requests[0].request_id]
    assert "[DONE]" not in client.text
    assert world.metric("request_success_total", finished_reason="abort") == 1
    assert (world.admission.num_admitted, world.leftovers) == (0, [])
    assert '"level": "error"' not in log.getvalue(), "no operator need look after it"


async def test_leaving_while_nothing_is_written_yet_cancels_too(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(asyncio.Event()))
    client = LeavingClient(world, body(stream=True))
    await client.leave_when(lambda: len(world.engine.requests) == 1)
    assert len(world.engine.cancelled) == 1
    assert world.metric("http_requests_total", status="499", route="/v1/video-chat") == 1


async def test_leaving_a_whole_answer_cancels_it(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER[:2], asyncio.Event()))
    client = LeavingClient(world, body())
    await client.leave_when(lambda: world.metric("generation_tokens_total") == 2)
    assert len(world.engine.cancelled) == 1
    assert world.admission.num_admitted == 0


async def test_leaving_during_the_decode_stops_the_decode(tmp_path: Path) -> None:
    world = World(tmp_path, decoder=FakeDecodePool(gate=asyncio.Event()))
    client = LeavingClient(world, body())
    await client.leave_when(lambda: len(world.decoder.contents) == 1)
    assert world.decoder.num_cancelled == 1
    assert world.engine.requests == []
    assert world.leftovers == []


async def test_leaving_while_waiting_for_a_turn_gives_everything_back(tmp_path: Path, in_line: list[str]) -> None:
    gate = asyncio.Event()
    world = World(tmp_path, decoder=FakeDecodePool(gate=gate), max_running_requests=1, decode_workers=1)
    busy = [LeavingClient(world, body(num_frames=number + 1)).start() for number in range(2)]
    await until(lambda: (len(world.decoder.requests), len(in_line)) == (1, 1))
    client = LeavingClient(world, body(num_frames=9))
    await client.leave_when(lambda: len(in_line) == 2)
    assert (len(in_line), world.admission.num_admitted, len(world.leftovers)) == (1, 2, 2)
    gate.set()
    await asyncio.wait_for(asyncio.gather(*busy), PATIENCE_S)
    assert {request.num_frames for request in world.decoder.requests} == {1, 2}
    assert (world.admission.num_admitted, world.leftovers) == (0, [])


async def test_leaving_during_the_upload_leaves_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    client = LeavingClient(world, body()[:20], is_whole=False)
    await client.leave_when(lambda: world.admission.num_admitted == 1)
    assert world.decoder.requests == []
    assert (world.admission.num_admitted, world.leftovers) == (0, [])


async def test_a_client_that_cannot_be_written_to_has_left(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER[:2], asyncio.Event()))
    client = LeavingClient(world, body(stream=True))
    send = client.send

    async def failing(message: Any) -> None:
        if b"A red" in message.get("body", b""):
            raise OSError("broken pipe")
        await send(message)

    client.send = failing  # type: ignore[method-assign]
    await asyncio.wait_for(client.start(), PATIENCE_S)
    assert len(world.engine.cancelled) == 1
    assert world.admission.num_admitted == 0


async def test_a_cancelled_connection_cancels_its_request(tmp_path: Path) -> None:
    world = World(tmp_path, FakeEngine(*ANSWER[:2], asyncio.Event()))
    client = LeavingClient(world, body(stream=True))
    running = client.start()
    await until(lambda: "A red" in client.text)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(world.engine.cancelled) == 1
    assert (world.admission.num_admitted, world.leftovers) == (0, [])


async def test_a_client_that_does_not_read_loses_its_place_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    monkeypatch.setattr(streaming, "FINAL_WRITE_TIMEOUT_S", 0.05)
    world = World(tmp_path, request_timeout_s=0.1)
    client = LeavingClient(world, body(stream=True))
    send = client.send

    async def blocked(message: Any) -> None:
        await send(message)
        if b"A red" in message.get("body", b"") or b"error" in message.get("body", b""):
            await asyncio.Event().wait()

    client.send = blocked  # type: ignore[method-assign]
    hold_deadlines(monkeypatch, until=lambda: "A red" in client.text)
    await asyncio.wait_for(client.start(), PATIENCE_S)
    assert len(world.engine.cancelled) == 1
    assert (world.admission.num_admitted, world.leftovers) == (0, [])
    assert '"level": "error"' not in log.getvalue()


async def test_leaving_while_a_sample_is_rendered_gives_the_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    begun: list[int] = []

    def render(seed: int) -> SampleClip:
        begun.append(seed)
        gate.wait(2 * PATIENCE_S)
        return SampleClip(b"", "")

    monkeypatch.setattr(page, "_render", render)
    world = World(tmp_path)
    clients = [LeavingClient(world, b"", method="GET", path=f"/page/samples/{seed}") for seed in range(3)]
    running = [client.start() for client in clients]
    await until(lambda: world.admission.num_admitted == 3 and len(begun) == 1)
    for client in clients:
        client.left.set()
    await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
    assert world.admission.num_admitted == 0
    gate.set()
    assert (await world.client.get("/page/samples/9")).status_code == 200
    assert begun == [0, 9], "nor is anything rendered for nobody"
