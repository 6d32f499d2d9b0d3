"""The real server on a real socket: disconnects, early answers to big uploads, and the order of a shutdown."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, NoReturn

import httpx
import psutil
import pytest
from prometheus_client import CollectorRegistry

from tests.api.test_stream import events_of
from tests.api.uploads import ALICE, BOB
from tests.api.world import DATA_URL, FILE, PATIENCE_S, URL, as_setting, until
from tests.fakes import ANSWER, FINISHED, PROMPT_READY, FakeDecodePool, FakeEngine
from vidspec_service.api import connections, middleware
from vidspec_service.api import server as server_module
from vidspec_service.api.server import bind, listen, running_app, serve
from vidspec_service.api.services import Remotes
from vidspec_service.api.uploads import json_body
from vidspec_service.decoding.clip import Clip, FrameRequest
from vidspec_service.end_signals import obeyed_signals
from vidspec_service.engine.types import TextDelta
from vidspec_service.errors import ConfigError
from vidspec_service.settings import Settings
from vidspec_service.telemetry import Metrics

pytestmark = [pytest.mark.api, pytest.mark.anyio]

ASKED = {"video": DATA_URL, "prompt": "x", "stream": True}


class Running:
    """A server in this process and its client."""

    def __init__(self, task: asyncio.Task[None], client: httpx.AsyncClient) -> None:
        self.task = task
        self.client = client

    async def is_ready(self) -> bool:
        return (await self.client.get("/health/ready")).status_code == 200


@asynccontextmanager
async def running(engine: FakeEngine, upload_dir: Path | None = None, **options: float | str) -> AsyncIterator[Running]:
    """Serve on a free port until the block ends."""
    settings = Settings(port=0, upload_dir=upload_dir, **options)  # type: ignore[arg-type]
    with bind(settings) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        metrics = Metrics(CollectorRegistry())
        task = asyncio.create_task(serve(settings, engine, FakeDecodePool().decode, metrics, sock, Remotes()))
        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as client:
            server = Running(task, client)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while not await answers(server):  # noqa: ASYNC110  the server has no event for this
                        await asyncio.sleep(0.01)
                yield server
            finally:
                if not task.done():
                    terminate()
                    terminate()
                await asyncio.wait_for(task, PATIENCE_S)


async def answers(server: Running) -> bool:
    try:
        return (await server.client.get("/health/live")).status_code == 200
    except httpx.TransportError:
        return False


def terminate(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def has_files(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))


async def test_a_closed_socket_closes_the_engines_generator() -> None:
    engine = FakeEngine(*ANSWER[:2], asyncio.Event())
    async with running(engine) as server:
        async with server.client.stream("POST", URL, json=ASKED) as response:
            async for line in response.aiter_lines():
                if "A red" in line:
                    break
        await until(lambda: engine.cancelled == [engine.requests[0].request_id])


async def test_a_request_as_a_proxy_would_get_it_finds_its_route() -> None:
    """RFC 9112 has servers accept the absolute form of the request target."""
    async with (
        running(FakeEngine()) as server,
        httpx.AsyncClient(proxy=str(server.client.base_url), base_url="http://vidspec.example") as client,
    ):
        assert [(await client.get(path)).status_code for path in ("/v1/models?x=1", "/", "/v1/model")] == [
            200,
            200,
            404,
        ]
        target_without_path = b"GET http://vidspec.example HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        assert (await exchanged(server, target_without_path)).startswith(b"HTTP/1.1 200 ")


async def test_tokens_are_sent_when_they_are_committed_and_not_before(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with running(FakeEngine(*ANSWER[:2], gate, *ANSWER[2:]), tmp_path) as server:
        async with server.client.stream("POST", URL, files=FILE, data={"prompt": "x", "stream": "1"}) as response:
            assert response.status_code == 200
            received = ""
            async for text in response.aiter_text():
                received += text
                if "A red" in text:
                    assert "square" not in received
                    gate.set()
        assert events_of(received)[-1] == "[DONE]"


async def test_a_client_that_is_still_sending_gets_to_read_why_it_is_refused(tmp_path: Path) -> None:
    async with running(FakeEngine(), tmp_path, max_upload_bytes=1000, max_json_bytes=1000) as server:
        response = await asyncio.to_thread(send_all_then_read, server.client.base_url.port or 0, 4_000_000)
        assert response.startswith(b"HTTP/1.1 413 ")
        assert b"video_too_large" in response
        assert await answers(server)


def send_all_then_read(port: int, num_bytes: int) -> bytes:
    """A simple client that does not read the answer before it has sent its whole body."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=X\r\n"
        sock.sendall(f"{head}Connection: close\r\nContent-Length: {num_bytes}\r\n\r\n".encode())
        sock.sendall(b"x" * num_bytes)
        return sock.makefile("rb").read()


@pytest.mark.parametrize("number", obeyed_signals())  # not SIGHUP under nohup
async def test_the_first_signal_drains_and_the_server_ends_when_it_is_idle(
    number: signal.Signals, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    engine = FakeEngine(*ANSWER[:2], gate, *ANSWER[2:])
    async with running(engine, tmp_path) as server:
        streamed = asyncio.create_task(server.client.post(URL, json=ASKED))
        await until(lambda: len(engine.requests) == 1)
        assert await server.is_ready()
        terminate(number)
        await asyncio.sleep(0.05)
        assert not await server.is_ready()
        refused = await server.client.post(URL, json=ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert not server.task.done()
        gate.set()
        assert events_of((await streamed).text)[-2]["choices"] == []
        await asyncio.wait_for(server.task, PATIENCE_S)
    assert not has_files(tmp_path)


async def test_a_server_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with running(FakeEngine(), tmp_path) as server:
            terminate(signal.SIGHUP)
            assert await server.is_ready()
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_stream_that_outlives_the_drain_gets_an_error_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = FakeEngine(*ANSWER[:2], asyncio.Event())
    async with running(engine, tmp_path, drain_timeout_s=0.1) as server:
        streamed = asyncio.create_task(server.client.post(URL, json=ASKED))
        await until(lambda: len(engine.requests) == 1)
        terminate()
        events = events_of((await streamed).text)
        assert events[-2]["error"]["code"] == "draining"
        assert events[-1] == "[DONE]"
        await asyncio.wait_for(server.task, PATIENCE_S)
    assert len(engine.cancelled) == 1
    told = [(record.message, vars(record)["num_requests"]) for record in caplog.records if "drain" in record.message]
    assert told == [("draining", 1), ("drain timed out", 1)]


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    engine = FakeEngine(*ANSWER[:2], asyncio.Event())
    async with running(engine, tmp_path, drain_timeout_s=60) as server:
        streamed = asyncio.create_task(server.client.post(URL, json=ASKED))
        await until(lambda: len(engine.requests) == 1)
        terminate()
        await asyncio.sleep(0.02)
        terminate()
        await asyncio.wait_for(server.task, PATIENCE_S)
        (ended,) = await asyncio.gather(streamed, return_exceptions=True)
    assert not isinstance(ended, httpx.TimeoutException), "or the client ended it, not the signal"
    assert len(engine.cancelled) == 1


@pytest.mark.parametrize("num_signals", [1, 2])
async def test_a_client_that_reads_nothing_delays_the_end_for_a_moment_and_not_after_a_second_signal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_signals: int
) -> None:
    body, text = b'{"prompt": "x"}', "x" * 50_000_000
    engine = FakeEngine(PROMPT_READY, TextDelta(text=text, num_tokens=1), FINISHED)
    async with running(engine, tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.client.base_url.port)) as client:
            client.setblocking(False)
            client.sendall(post(body, f"content-length: {len(body)}"))
            assert await asyncio.get_running_loop().sock_recv(client, 1)  # now the server waits to send the rest
            for _ in range(num_signals):
                terminate()
            await asyncio.wait_for(server.task, PATIENCE_S)
    assert caplog.text.count("timeout graceful shutdown exceeded") == 2 - num_signals
    assert caplog.text.count("second signal: stopping now") == num_signals - 1


async def test_a_client_that_takes_nothing_of_its_answer_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_UNREAD_S", 0.1)
    body, text = b'{"prompt": "x"}', "x" * 50_000_000
    engine = FakeEngine(PROMPT_READY, TextDelta(text=text, num_tokens=1), FINISHED)
    async with running(engine, tmp_path) as server:
        port = server.client.base_url.port
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(post(body, f"content-length: {len(body)}"))
            await until(lambda: len(engine.requests) == 1)
            await until(lambda: not holds(client))
    assert [record.message for record in caplog.records if record.exc_info] == []


def holds(client: socket.socket) -> bool:
    """Whether this process, in which the server runs, has the other end of the client's connection."""
    return any(each.raddr == client.getsockname() for each in psutil.Process().net_connections("tcp"))


async def test_the_operators_folder_is_made_for_nobody_else(tmp_path: Path) -> None:
    async with running(FakeEngine(), tmp_path / "new" / "folder"):
        assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


async def test_a_kept_video_and_its_frames_go_in_their_time_also_when_nobody_asks_for_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, freed = FakeDecodePool.decode, list[Path]()

    async def watched(pool: FakeDecodePool, path: Path, request: FrameRequest) -> Clip:
        clip = await decode(pool, path, request)
        weakref.finalize(clip.video.frames, freed.append, path)
        return clip

    monkeypatch.setattr(FakeDecodePool, "decode", watched)
    async with running(FakeEngine(), tmp_path, video_ttl_s=0.2) as server:
        assert (await server.client.post("/v1/videos", files=FILE)).status_code == 200
        assert has_files(tmp_path)
        await until(lambda: not has_files(tmp_path) and len(freed) == 1)


@pytest.mark.parametrize(("ttl_s", "intervals_s"), [(0.2, [0.2, 30.0]), (3600.0, [30.0, 360.0])])
async def test_expired_videos_here_go_within_half_a_minute_and_a_shared_store_is_listed_more_rarely(
    monkeypatch: pytest.MonkeyPatch, ttl_s: float, intervals_s: list[float]
) -> None:
    seen: list[float] = []

    async def noted(work: object, interval_s: float) -> None:
        seen.append(interval_s)

    monkeypatch.setattr(server_module, "repeatedly", noted)
    async with running(FakeEngine(), video_ttl_s=ttl_s):
        assert seen == intervals_s


async def test_kept_videos_end_with_the_server(tmp_path: Path) -> None:
    async with running(FakeEngine(), tmp_path) as server:
        assert (await server.client.post("/v1/videos", files=FILE)).status_code == 200
        assert has_files(tmp_path)
    assert not has_files(tmp_path)


async def test_the_process_that_tries_grammars_starts_and_ends_with_the_server() -> None:
    def children() -> set[psutil.Process]:
        return set(psutil.Process().children())

    before = children()
    async with running(FakeEngine()):
        await until(lambda: children() > before)
    assert children() == before


@pytest.mark.parametrize(
    ("options", "warnings"),
    [({"host": "127.0.0.1"}, 0), ({"host": "0.0.0.0"}, 1), ({"host": "0.0.0.0", "api_keys": "k" * 32}, 0)],
)
async def test_a_server_that_others_can_reach_and_that_asks_for_no_key_says_so(
    options: dict[str, str], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(FakeEngine(), None, **options):
        assert caplog.text.count("anyone who can reach this address can use the server") == warnings


async def test_a_taken_port_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot bind 127\.0\.0\.1:{port}: Address already in use"):
            bind(Settings(port=port))


async def test_a_server_can_be_started_again_at_once_where_clients_were_connected() -> None:
    with bind(Settings(port=0)) as first:
        address = first.getsockname()
        first.listen()
        with socket.create_connection(address) as client:
            first.accept()[0].close()
            assert client.recv(1) == b"", "the server's end closes first: it stays known to the kernel for a minute"
    bind(Settings(port=address[1])).close()


async def test_of_two_servers_that_load_at_the_same_time_the_second_cannot_listen() -> None:
    with bind(Settings(port=0)) as first:
        port = first.getsockname()[1]
        with bind(Settings(port=port)) as second:
            listen(first)
            with pytest.raises(
                ConfigError, match=rf"cannot listen at http://127\.0\.0\.1:{port}: Address already in use"
            ):
                listen(second)


async def test_a_machine_without_the_protocol_of_an_address_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux that was booted without IPv6."""

    def unsupported(*_: object) -> NoReturn:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", unsupported)
    with pytest.raises(ConfigError, match="cannot bind :::8000: Address family not supported"):
        bind(Settings(host="::"))


async def test_bodies_of_one_key_that_take_long_to_check_do_not_hold_up_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty bodies of 600 kB, all quotes, took every thread, and each step of the other request waited for all."""
    checked, num_begun, over = json_body._validated, 0, threading.Event()

    def slowly(model: type[Any], body: bytearray) -> Any:
        nonlocal num_begun
        if b"slow" in body:
            num_begun += 1
            over.wait(PATIENCE_S)
        return checked(model, body)

    async def ask(prompt: str, key: str) -> httpx.Response:
        return await client.post(URL, json={"prompt": prompt}, headers={"authorization": f"Bearer {key}"})

    monkeypatch.setattr(json_body, "_validated", slowly)
    monkeypatch.setattr(server_module, "_NUM_THREADS", 4)
    settings, metrics = Settings(upload_dir=tmp_path, api_keys=as_setting([ALICE, BOB])), Metrics(CollectorRegistry())
    async with (
        running_app(settings, FakeEngine(), FakeDecodePool().decode, metrics, Remotes()) as (app, _),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        greedy = [asyncio.create_task(ask("slow", ALICE)) for _ in range(10)]
        await until(lambda: num_begun >= 2)
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert (await ask("x", BOB)).status_code == 200
            assert num_begun == 2, "half of the threads"
        finally:
            over.set()
        assert {(await each).status_code for each in greedy} == {200}


async def test_an_upload_folder_that_cannot_be_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings, metrics = Settings(port=0, upload_dir=tmp_path / "file" / "folder"), Metrics(CollectorRegistry())
    with bind(settings) as sock, pytest.raises(ConfigError, match="cannot use upload_dir"):
        await serve(settings, FakeEngine(), FakeDecodePool().decode, metrics, sock, Remotes())


async def test_a_small_answer_does_not_wait_for_the_clients_acknowledgement() -> None:
    """A connection must inherit TCP_NODELAY; without it each event of a stream came some 40 ms late."""
    with bind(Settings(port=0)) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_an_endless_body_after_an_early_answer_is_not_read_for_ever(tmp_path: Path) -> None:
    """The server reads on for a moment, so that the client sees the answer, then closes the connection."""
    options: dict[str, float] = {"max_upload_bytes": 1_000_000, "max_json_bytes": 1_000_000}
    async with running(FakeEngine(), tmp_path, **options) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.client.base_url.port)
        head = f"POST {URL} HTTP/1.1\r\nhost: a\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        num_sent, chunk = 0, b"100000\r\n" + bytes(0x100000) + b"\r\n"
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while num_sent < 1000 * len(chunk):
                    writer.write(chunk)
                    await writer.drain()
                    num_sent += len(chunk)
        assert num_sent < 200 * len(chunk)
        assert await server.is_ready()
        writer.close()


async def test_connections_beyond_the_descriptors_are_refused_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "max_connections", lambda _: 6)
    async with running(FakeEngine()) as server:
        port = server.client.base_url.port
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]  # `server.client` has 1
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            refusal = await reader.read()  # to EOF: the server closes it, too
            assert refusal.startswith(b"HTTP/1.1 503 ")
            assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["code"] == "queue_full"
            writer.close()
        assert await server.is_ready()
        for _, writer in idle:
            writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while not await _fresh_answers(port):  # noqa: ASYNC110  the server has no event for this
                await asyncio.sleep(0.01)
    assert [record.message for record in caplog.records].count("too many connections") == 1
    assert [record.message for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(
    ("most", "crowd", "quiet_s", "stays"),
    [(100, 9, 600, True), (100, 9, 3600, False), (3, 9, 6, False), (100, 1, 6, False)],
)
async def test_a_quiet_connection_outlives_the_patience_of_proxies_unless_there_are_many(
    monkeypatch: pytest.MonkeyPatch, most: int, crowd: int, quiet_s: int, stays: bool
) -> None:
    """A request that a proxy sends into a connection just as it closes is a 502 to its client."""
    ask = b"GET /health/live HTTP/1.1\r\nhost: a\r\n\r\n"
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(server_module, "max_connections", lambda _: most)
    monkeypatch.setattr(connections, "_CROWD", crowd)
    async with running(FakeEngine()) as server:
        port = server.client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer):
            writer.write(ask)
            assert (await reader.read(4096)).startswith(b"HTTP/1.1 200 ")
            now = loop.time
            monkeypatch.setattr(loop, "time", lambda: now() + quiet_s)
            assert await _fresh_answers(port)  # by now, what was due has happened
            answer = b""
            with suppress(ConnectionError):
                writer.write(ask)
                answer = await reader.read(4096)
            assert answer.startswith(b"HTTP/1.1 200 ") == stays


async def test_a_proxy_is_known_by_its_ipv4_address_also_where_ipv6_is_served(tmp_path: Path) -> None:
    engine = FakeEngine(*ANSWER[:2], asyncio.Event())
    statuses = []
    async with running(engine, tmp_path, host="::", max_requests_per_key=1) as server, AsyncExitStack() as held:
        for address in ("192.0.2.1", "192.0.2.1", "192.0.2.2"):
            asking = server.client.stream("POST", URL, json=ASKED, headers={"x-forwarded-for": address})
            statuses.append((await held.enter_async_context(asking)).status_code)
    assert statuses == [200, 429, 200]


async def exchanged(server: Running, *sent: bytes) -> bytes:
    """All that the server answers to bytes that httpx would not send, up to its end; each waits for an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.client.base_url.port)
    found = b""
    async with asyncio.timeout(PATIENCE_S):
        for each in sent:
            writer.write(each)
            found += await reader.read(4096)
        found += await reader.read()
    writer.close()
    return found


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: a", "content-type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def test_uvicorn_adds_no_lines_to_the_log_and_does_not_tell_its_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running(FakeEngine()) as server:
        answer = await server.client.get("/version")
    assert "server" not in answer.headers
    assert [record.message for record in caplog.records if record.name == "uvicorn.access"] == []


async def test_a_client_that_offers_http_2_is_answered_in_http_1(caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"prompt": "x"}'
    offer = "connection: upgrade, http2-settings, close", "upgrade: h2c", "http2-settings: AAMAAABk"
    async with running(FakeEngine()) as server:
        answered = await exchanged(server, post(body, *offer, f"content-length: {len(body)}"))
    assert answered.startswith(b"HTTP/1.1 200 ")
    assert "upgrade" not in caplog.text


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """A server also tells that it has deleted what a killed one left, perhaps that of a test beside this one."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_what_is_no_http_is_a_400_in_the_shape_of_all_errors_and_in_the_log_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(FakeEngine()) as server:
        for sent in (
            b"\x16\x03\x01 TLS\r\n\r\n",
            post(b"", "x: " + "a" * 70_000).removesuffix(b"\r\n\r\n"),
            post(b"this is no chunk\r\n", "transfer-encoding: chunked"),
        ):
            head, _, body = (await exchanged(server, sent)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert {b"content-type: application/json", b"connection: close"} <= set(head.split(b"\r\n"))
            assert json.loads(body)["error"]["code"] == "invalid_request"
        assert [record.message for record in warnings_in(caplog)] == ["a request is not valid HTTP"]


async def test_a_body_that_breaks_off_after_its_answer_ends_the_connection_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = post(b"5\r\nhello\r\n", "transfer-encoding: chunked", "content-encoding: gzip")
    async with running(FakeEngine()) as server:
        answered = await exchanged(server, refused, b"this is no chunk\r\n")
    assert answered.startswith(b"HTTP/1.1 415 ")
    assert answered.count(b"HTTP/1.1") == 1
    assert [record.message for record in caplog.records if record.exc_info] == []


async def test_a_client_that_stops_sending_its_body_after_an_early_answer_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.05)
    async with running(FakeEngine()) as server:
        answered = await exchanged(server, post(b"{", "content-length: 1000", "content-encoding: gzip"))
    assert answered.startswith(b"HTTP/1.1 415 ")


async def test_a_body_that_ends_in_two_ways_is_refused_with_all_that_follows() -> None:
    hidden = b"0\r\n\r\nGET /version HTTP/1.1\r\nhost: a\r\n\r\n"
    async with running(FakeEngine()) as server:
        answered = await exchanged(server, post(hidden, "content-length: 5", "transfer-encoding: chunked"))
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert answered.count(b"HTTP/1.1 ") == 1


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks() -> None:
    body = b'{"prompt": "x", "stream": true}'
    sent = post(body, f"content-length: {len(body)}").replace(b"HTTP/1.1", b"HTTP/1.0")
    async with running(FakeEngine()) as server:
        head, _, events = (await exchanged(server, sent)).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert events.startswith(b"data: ")
    assert events.endswith(b"data: [DONE]\n\n")


async def _fresh_answers(port: int | None) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 200")


async def test_asyncios_line_for_each_connection_it_cannot_accept_is_one_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    async with running(FakeEngine()):
        for _ in range(1000):
            loop.call_exception_handler(
                {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
            )
        loop.call_exception_handler({"message": "something else"})
        warning, error = warnings_in(caplog)
        assert vars(warning)["error"] == "[Errno 24] Too many open files"
        assert error.message == "something else"
    loop.set_exception_handler(None)


@pytest.mark.parametrize(("host", "why"), [("ä..b", "encoding of hostname failed"), ("a..b", "not known")])
async def test_a_host_that_is_no_name_is_a_config_error(host: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot bind .*:8000: .*{why}; choose another --port or --host"):
        bind(Settings(host=host))
