"""A valid request to /v1/chat/completions, which tests change."""

from __future__ import annotations

import base64
from typing import Any

import httpx

from tests.api.world import DATA_URL, World

URL = "/v1/chat/completions"
VIDEO = {"type": "video_url", "video_url": {"url": DATA_URL}}
IMAGE_BYTES = b"\x89PNG\r\n\x1a\n-not-really-an-image"
IMAGE_URL = f"data:image/png;base64,{base64.b64encode(IMAGE_BYTES).decode()}"
IMAGE = {"type": "image_url", "image_url": {"url": IMAGE_URL, "detail": "auto"}}
ASK = {"type": "text", "text": "What moves?"}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def ask(world: World, **fields: Any) -> httpx.Response:
    """A valid request, with `fields` changed."""
    body = {"model": "fake-target", "messages": [user(VIDEO, ASK)], **fields}
    return await world.client.post(URL, json=body)
