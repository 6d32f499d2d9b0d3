"""A server may be named as people name it: a URL, HOST:PORT or HOST."""

from __future__ import annotations

import pytest

from vidspec_service.loopback import server_url


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
