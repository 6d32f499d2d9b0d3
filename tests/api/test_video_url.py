"""Fetching a video from an allowed server, and every attack that a server may try."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from tests.api import chat
from tests.api.https_site import AUTHORITY, HOST, Lookup, Site, answer, ask, is_called_public, settings_for, world_of
from tests.api.world import CLIP_BYTES, PATIENCE_S, World, until
from vidspec_service.api.uploads.fetching import MAX_REDIRECTS, Fetcher

pytestmark = [pytest.mark.api, pytest.mark.anyio]


async def test_an_allowed_video_is_fetched_and_answered_about(tmp_path: Path) -> None:
    async with Site(answer(200, CLIP_BYTES)).open() as site:
        lookup = Lookup()
        world = world_of(tmp_path, site, lookup)
        response = await ask(world, f"https://{HOST}:{site.port}/a/b.m3u8?c=d#e")
    assert response.status_code == 200, response.text
    assert world.decoder.contents == [CLIP_BYTES]
    assert lookup.asked == [HOST]
    assert site.names == [HOST]
    (head,) = site.heard
    assert head.startswith("GET /a/b.m3u8?c=d HTTP/1.1\r\n")
    assert f"host: {HOST}:{site.port}\r\n" in head.lower()
    assert "accept-encoding: identity\r\n" in head.lower()


async def test_the_other_routes_fetch_too_and_the_same_content_is_the_same_video(tmp_path: Path) -> None:
    async with Site(answer(200, CLIP_BYTES)).open() as site:
        world, url = world_of(tmp_path, site), f"https://{HOST}:{site.port}/a"
        part = {"type": "video_url", "video_url": {"url": url}}
        content = [part, {"type": "text", "text": "x"}]
        body = {"messages": [{"role": "user", "content": content}]}
        assert (await world.client.post("/v1/chat/completions", json=body)).status_code == 200
        form = {"prompt": (None, "x"), "video_url": (None, url)}
        assert (await world.client.post("/v1/video-chat", files=form)).status_code == 200
        kept = await world.client.post("/v1/videos", json={"video_url": url})
        assert kept.status_code == 200
        assert (await world.ask(video=None, video_id=kept.json()["id"])).status_code == 200
    assert len(world.decoder.requests) == 1


async def test_an_image_is_fetched_as_one(tmp_path: Path) -> None:
    async with Site(answer(200, chat.IMAGE_BYTES)).open() as site:
        world = world_of(tmp_path, site)
        image = {"type": "image_url", "image_url": {"url": f"https://{HOST}:{site.port}/a"}}
        response = await chat.ask(world, messages=[chat.user(image, chat.ASK)])
    assert response.status_code == 200, response.text
    assert [request.is_still for request in world.decoder.requests] == [True]


async def test_the_checked_address_is_dialled_whatever_the_name_says_next(tmp_path: Path) -> None:
    async with Site(answer(200, CLIP_BYTES)).open() as site:
        lookup = Lookup(["127.0.0.1"], ["10.0.0.1"])  # DNS rebinding
        response = await ask(world_of(tmp_path, site, lookup), f"https://{HOST}:{site.port}/")
    assert response.status_code == 200
    assert lookup.asked == [HOST]


@pytest.mark.parametrize("found", [["10.0.0.1"], ["::1"], ["127.0.0.1", "192.168.0.1"], []])
async def test_a_name_with_a_private_address_is_not_dialled(tmp_path: Path, found: list[str]) -> None:
    async with Site(answer(200, CLIP_BYTES)).open() as site:
        response = await ask(world_of(tmp_path, site, Lookup(found)), f"https://{HOST}:{site.port}/")
        assert site.heard == []
    assert (response.status_code, response.json()["error"]["param"]) == (400, "video_url")
    assert not [address for address in found if address in response.text]


async def test_an_address_that_does_not_answer_is_not_the_last_word(tmp_path: Path) -> None:
    async with Site(answer(200, CLIP_BYTES)).open() as site:
        lookup = Lookup(["127.0.0.2", "127.0.0.1"])  # nobody listens at the first
        assert (await ask(world_of(tmp_path, site, lookup), f"https://{HOST}:{site.port}/")).status_code == 200


async def test_a_certificate_for_another_name_is_not_accepted(tmp_path: Path) -> None:
    async with Site(answer(200, CLIP_BYTES), certified="evil.example").open() as site:
        response = await ask(world_of(tmp_path, site), f"https://{HOST}:{site.port}/")
        assert site.heard == []
    assert (response.status_code, response.json()["error"]["code"]) == (422, "video_not_fetched")
    assert "certificate" not in response.text


async def test_the_authorities_that_are_trusted_are_read_once_and_those_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[ssl.SSLContext] = []
    create = httpx.create_ssl_context

    def counted() -> ssl.SSLContext:
        read.append(create())
        return read[-1]

    monkeypatch.setattr(httpx, "create_ssl_context", counted)
    async with Site(answer(200, CLIP_BYTES)).open() as site:
        fetcher = Fetcher(settings_for(site), resolve=Lookup(), public=is_called_public)
        world = World(tmp_path, fetcher=fetcher)
        refused = await ask(world, f"https://{HOST}:{site.port}/")
        AUTHORITY.configure_trust(read[0])
        taken = await ask(world, f"https://{HOST}:{site.port}/")
    assert (refused.json()["error"]["code"], taken.status_code, len(read)) == ("video_not_fetched", 200, 1)


async def test_a_redirect_is_followed_to_an_allowed_place(tmp_path: Path) -> None:
    async def script(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(200, CLIP_BYTES) if path == "/real" else answer(302, location="/real"))

    async with Site(script).open() as site:
        lookup = Lookup()
        response = await ask(world_of(tmp_path, site, lookup), f"https://{HOST}:{site.port}/")
    assert response.status_code == 200
    assert lookup.asked == [HOST, HOST]


@pytest.mark.parametrize(
    "location",
    ["http://videos.example/a", "https://169.254.169.254/latest/meta-data", "https://evil.example/", "//evil.example/",
     "file:///etc/passwd", "https://[::1", "https://videos.example:22/", "\\\\evil",
     "https://xn--/", "https:////[:"],
)  # fmt: skip
async def test_a_redirect_to_any_other_place_is_refused(tmp_path: Path, location: str) -> None:
    async with Site(answer(302, location=location)).open() as site:
        response = await ask(world_of(tmp_path, site), f"https://{HOST}:{site.port}/")
        assert len(site.heard) == 1
    assert response.status_code in (400, 422)
    assert location not in response.text


async def test_a_redirect_to_a_name_that_became_private_is_refused(tmp_path: Path) -> None:
    async with Site(answer(302, location="/again")).open() as site:
        lookup = Lookup(["127.0.0.1"], ["169.254.169.254"])
        response = await ask(world_of(tmp_path, site, lookup), f"https://{HOST}:{site.port}/")
        assert len(site.heard) == 1
    assert response.status_code == 400


async def test_redirects_without_end_are_given_up(tmp_path: Path) -> None:
    async with Site(answer(301, location="/round")).open() as site:
        response = await ask(world_of(tmp_path, site), f"https://{HOST}:{site.port}/")
        assert len(site.heard) == MAX_REDIRECTS + 1
    assert response.json()["error"]["code"] == "video_not_fetched"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (answer(404, b"no"), 422, "video_not_fetched"),
        (answer(206, CLIP_BYTES), 422, "video_not_fetched"),
        (answer(304), 422, "video_not_fetched"),
        (answer(200, b"x" * 50, content_encoding="gzip"), 422, "video_not_fetched"),
        (answer(200, b"", content_length="1001"), 413, "video_too_large"),
        (answer(200, b"<!doctype html>" + b"x" * 500), 415, "video_unsupported"),
        (answer(200, b""), 422, "video_unreadable"),
        (answer(200, CLIP_BYTES, content_length="900"), 422, "video_not_fetched"),
        (b"\x00\x01nonsense\r\n\r\n", 422, "video_not_fetched"),
        (b"", 422, "video_not_fetched"),
    ],
)
async def test_what_is_not_a_video_is_refused(tmp_path: Path, sent: bytes, status: int, code: str) -> None:
    async with Site(sent).open() as site:
        response = await ask(world_of(tmp_path, site), f"https://{HOST}:{site.port}/")
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text


@pytest.mark.parametrize("encoding", ["", "Identity"])
async def test_content_that_is_not_compressed_may_say_so_in_any_way(tmp_path: Path, encoding: str) -> None:
    async with Site(answer(200, CLIP_BYTES, content_encoding=encoding)).open() as site:
        assert (await ask(world_of(tmp_path, site), f"https://{HOST}:{site.port}/")).status_code == 200


async def test_a_video_of_the_largest_size_is_fetched(tmp_path: Path) -> None:
    async with Site(answer(200, CLIP_BYTES.ljust(1000, b"v"))).open() as site:
        assert (await ask(world_of(tmp_path, site), f"https://{HOST}:{site.port}/")).status_code == 200


async def test_an_endless_video_is_cut_off_at_the_limit(tmp_path: Path) -> None:
    async def script(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + CLIP_BYTES)
        while True:
            writer.write(b"v" * 65536)
            await writer.drain()

    async with Site(script).open() as site:
        response = await ask(world_of(tmp_path, site), f"https://{HOST}:{site.port}/")
    assert (response.status_code, response.json()["error"]["code"]) == (413, "video_too_large")


async def test_a_video_that_trickles_is_given_up_in_time(tmp_path: Path) -> None:
    async def script(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + CLIP_BYTES[:12])
        while True:
            writer.write(b"v")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with Site(script).open() as site:
        async with asyncio.timeout(PATIENCE_S):
            response = await ask(world_of(tmp_path, site, timeout_s=0.3), f"https://{HOST}:{site.port}/")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (422, "video_not_fetched")
    assert "VIDSPEC_VIDEO_URL_TIMEOUT_S" in error["message"]


async def test_what_is_fetched_counts_as_if_it_had_been_sent(tmp_path: Path) -> None:
    async def script(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + CLIP_BYTES.ljust(900, b"v"))
        await writer.drain()
        await asyncio.Event().wait()

    async with Site(script).open() as site:
        world = world_of(tmp_path, site)
        asking = asyncio.create_task(ask(world, f"https://{HOST}:{site.port}/"))
        await until(lambda: world.admission.num_bytes > 900)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert (world.admission.num_bytes, world.leftovers) == (0, [])


async def test_no_proxy_is_asked_for_what_was_looked_up_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"https_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}.items():
        monkeypatch.setenv(name, value)
    async with Site(answer(200, CLIP_BYTES)).open() as site:
        assert (await ask(world_of(tmp_path, site), f"https://{HOST}:{site.port}/")).status_code == 200


async def test_by_default_nothing_is_fetched_whatever_the_url(tmp_path: Path) -> None:
    response = await World(tmp_path).ask(video=None, video_url=f"http://{HOST}/")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "video_url")
    assert "does not fetch" in response.json()["error"]["message"]


async def test_the_operator_names_the_hosts(tmp_path: Path) -> None:
    world = World(tmp_path, video_url_hosts=("other.example",))
    response = await world.ask(video=None, video_url=f"https://{HOST}/")
    assert "VIDSPEC_VIDEO_URL_HOSTS" in response.json()["error"]["message"]
