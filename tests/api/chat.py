"""A valid request to /v1/chat/completions, to be changed by tests."""

from __future__ import annotations

from typing import Any

import httpx

from tests.api.world import DATA_URL, World

URL = "/v1/chat/completions"
VIDEO = {"type": "video_url", "video_url": {"url": DATA_URL}}
ASK = {"type": "text", "text": "What moves?"}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def ask(world: World, **fields: Any) -> httpx.Response:
    """A valid request, with `fields` changed."""
    body = {"model": "fake-target", "messages": [user(VIDEO, ASK)], **fields}
    return await world.client.post(URL, json=body)
