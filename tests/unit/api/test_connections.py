"""How many connections leave descriptors for the rest of the server."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from vidspec_service.api.connections import max_connections
from vidspec_service.settings import Settings


def test_all_descriptors_are_taken_and_those_of_every_request_and_clip_kept_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[tuple[int, int]] = [(1024, 100_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    usual = max_connections(Settings())
    assert limits[-1] == (100_000, 100_000)
    assert 50_000 < usual < 100_000
    larger: list[dict[str, Any]] = [
        {"max_running_requests": 100},
        {"max_queued_requests": 100},
        {"max_videos_per_request": 100},
        {"max_cached_frame_bytes": 2**30},
    ]
    assert all(max_connections(Settings(**each)) < usual for each in larger)
    limits.append((256, 256))
    assert max_connections(Settings()) > 0, "a server with few descriptors answers somebody"
