"""Which URLs may be fetched: https, a host on the list, and only public internet addresses behind it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.api.errors import VideoNotFetched
from vidspec_service.api.uploads.fetching import Resolver, addresses_of, allowed_url, is_public
from vidspec_service.errors import InvalidRequest

HOSTS = ("videos.example", "cdn.example:8443", "XN--MNCHEN-3YA.example", "[2606:4700::1111]:8443")


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("https://videos.example/a.mp4", "videos.example", 443),
        ("HTTPS://VIDEOS.EXAMPLE/a.mp4?x=1#y", "videos.example", 443),
        ("https://videos.example:443/", "videos.example", 443),
        ("https://cdn.example:8443/a", "cdn.example", 8443),
        ("https://xn--mnchen-3ya.example/a", "xn--mnchen-3ya.example", 443),
        ("https://[2606:4700::1111]:8443/a", "2606:4700::1111", 8443),
    ],
)
def test_a_host_of_the_list_is_allowed(url: str, host: str, port: int) -> None:
    allowed = allowed_url(url, HOSTS)
    assert (allowed.raw_host.decode(), allowed.port or 443) == (host, port)


@pytest.mark.parametrize(
    "url",
    [
        "http://videos.example/a.mp4",
        "ftp://videos.example/a.mp4",
        "file:///etc/passwd",
        "//videos.example/a",
        "videos.example/a",
        "https://",
        "https://other.example/a.mp4",
        "https://videos.example.evil.com/a",
        "https://evil.com/videos.example",
        "https://videos.example@evil.com/a",
        "https://evil.com@videos.example/a",
        "https://user:pass@videos.example/a",
        "https://evil.com\\@videos.example/a",
        "https://videos.example\\.evil.com/a",
        "https://evil.com#@videos.example/",
        "https://evil.com?@videos.example/",
        "https://videos.example:8443/a",
        "https://cdn.example/a",
        "https://videos.example:99999/",
        "https://xn--/",
        "https://xn--ffff/a",
        "https://videos.example /a",
        "https://videos.example/\r\nHost: evil",
        "https://videos.examplé/a",
        "https://videos.example./a",
        "https://[::1]/a",
        "https://127.0.0.1/a",
        "https://[::1",
        "https://videos.example/" + "a" * 3000,
        "javascript:alert(1)",
        "",
    ],
)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        allowed_url(url, HOSTS)
    assert caught.value.param == "video_url"


@given(st.text(max_size=60))
def test_no_text_gets_past_the_list_or_breaks_the_check(text: str) -> None:
    for url in (text, f"https://{text}", f"https://videos.example{text}", f"https://{text}@videos.example/"):
        try:
            allowed = allowed_url(url, HOSTS)
        except InvalidRequest:
            continue
        assert allowed.scheme == "https"
        assert (allowed.host, allowed.port or 443) in (("videos.example", 443), ("cdn.example", 8443))
        assert httpx.URL(url).host == allowed.host


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    ["fec0::1", "feff::1", "192.88.99.1", "::ffff:192.88.99.1",
        "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1",
        "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "ff0e::1",
        "2001:db8::1", "3fff::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a9fe:a9fe::1",
        "2001:0:4136:e378::1", "not an address", "",
    ],
)  # fmt: skip
def test_addresses_of_this_machine_of_networks_and_of_tunnels_are_not(address: str) -> None:
    assert not is_public(address)


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_judged_the_same_in_its_ipv6_clothes(address: ipaddress.IPv4Address) -> None:
    assert is_public(f"::ffff:{address}") == is_public(str(address))


def lookup(*found: str) -> list[str]:
    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("videos.example", 443)
        return list(found)

    return asyncio.run(addresses_of(httpx.URL("https://videos.example/"), resolve, is_public))


def test_all_addresses_of_a_host_are_its_addresses() -> None:
    assert lookup("8.8.8.8", "1.1.1.1") == ["8.8.8.8", "1.1.1.1"]


@pytest.mark.parametrize("found", [("127.0.0.1",), ("8.8.8.8", "10.0.0.1"), ("::ffff:10.0.0.1", "8.8.8.8"), ()])
def test_one_address_that_is_not_public_spoils_all(found: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match="public internet"):
        lookup(*found)


def test_a_host_without_an_address_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(VideoNotFetched, match="cannot be resolved"):
        asyncio.run(addresses_of(httpx.URL("https://videos.example/"), Resolver(), is_public))


def test_addresses_are_looked_up_each_once() -> None:
    assert asyncio.run(Resolver()("127.0.0.1", 443)) == ["127.0.0.1"]
    assert {"127.0.0.1", "::1"} >= set(asyncio.run(Resolver()("localhost", 443))) > set()


def test_lookups_that_hang_take_no_thread_from_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    over, count = threading.Event(), 64
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(60) and [])

    async def hang() -> None:
        resolver, begun = Resolver(), threading.active_count()
        lookups = [asyncio.create_task(resolver("videos.example", 443)) for _ in range(count)]
        try:
            await asyncio.sleep(0)  # all are asked for
            assert threading.active_count() - begun < count, "their threads have a bound"
            async with asyncio.timeout(10):
                await asyncio.to_thread(bool)
        finally:
            over.set()
            await asyncio.gather(*lookups)

    asyncio.run(hang())


def test_a_process_that_ends_does_not_wait_for_a_lookup_that_hangs() -> None:
    program = """
import asyncio, os, socket
from vidspec_service.api.uploads.fetching import Resolver

async def give_up():
    looking_up = asyncio.create_task(Resolver()("videos.example", 443))
    await asyncio.sleep(0)
    looking_up.cancel()

socket.getaddrinfo = lambda *_, **__: os.read(0, 1)
asyncio.run(give_up())
"""
    never, writer = os.pipe()
    try:
        ended = subprocess.run([sys.executable, "-c", program], stdin=never, capture_output=True, timeout=30, text=True)
    finally:
        os.close(writer)
        os.close(never)
    assert (ended.returncode, ended.stderr) == (0, "")
