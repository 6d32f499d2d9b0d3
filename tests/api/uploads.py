"""Helpers that upload to /v1/videos as one caller or another."""

from __future__ import annotations

from typing import Any

from tests.api.world import CLIP_BYTES, FILE, World

VIDEOS = "/v1/videos"
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def other_clip(number: int) -> dict[str, Any]:
    """A file part whose bytes depend on `number`."""
    return {"video": ("x", CLIP_BYTES + bytes([number]))}


def as_(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def upload(world: World, files: Any = FILE, **options: Any) -> dict[str, Any]:
    response = await world.client.post(VIDEOS, files=files, **options)
    assert response.status_code == 200, response.text
    kept: dict[str, Any] = response.json()
    return kept
