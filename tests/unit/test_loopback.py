"""A server may be named as people name it: a URL, HOST:PORT or HOST."""

from __future__ import annotations

import pytest

from vidspec_service.loopback import server_url, shown


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://localhost", "http://localhost"),
        ("https://answers.example/vidspec/", "https://answers.example/vidspec"),
        ("localhost", "http://localhost:8000"),
        ("localhost/", "http://localhost:8000"),
        ("localhost:80", "http://localhost:80"),
        ("[::1]", "http://[::1]:8000"),
        ("[::1]:9000", "http://[::1]:9000"),
        ("answers.example/vidspec", "http://answers.example/vidspec"),
    ],
)
def test_a_host_without_scheme_and_port_is_asked_on_the_port_that_servers_listen_on(
    address: str, expected: str
) -> None:
    assert server_url(address) == expected


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://me:p@ss@answers.example:9/v1", "http://answers.example:9/v1"),
        ("http://answers.example//v1/@me", "http://answers.example//v1/@me"),
    ],
)
def test_a_message_has_an_address_without_what_is_private_in_it(url: str, told: str) -> None:
    assert shown(url) == told
