"""How many connections leave descriptors for the rest of the server."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from vidspec_service.api.connections import max_connections
from vidspec_service.api.store.clip_cache import MIN_CLIP_BYTES
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
    one_clip_more = max_connections(Settings(max_cached_frame_bytes=Settings().max_cached_frame_bytes + MIN_CLIP_BYTES))
    assert usual - one_clip_more == 2, "to map its frames here, and to pass them to the workers"
    one_video_more = max_connections(Settings(max_videos_per_request=Settings().max_videos_per_request + 1))
    assert usual - one_video_more == 3 * 80, "of each request: the two, and one more for its payload"
    limits.append((256, 256))
    assert max_connections(Settings()) > 0, "a server with few descriptors answers somebody"
