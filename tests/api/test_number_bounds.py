"""Every number in a request is limited to what the engine accepts: beyond that, a 400 names the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.api.world import CLIP_BYTES, URL, World
from vidspec_models.request import Video
from vidspec_service.api.schemas.chat_completions import ChatCompletionRequest
from vidspec_service.api.schemas.completions import CompletionRequest
from vidspec_service.api.schemas.video_chat import VideoChatForm, VideoChatJson
from vidspec_service.engine.ipc.payload import close_fds, read_request, write_request

pytestmark = [pytest.mark.api, pytest.mark.anyio]

ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    URL: (VideoChatJson, {"prompt": "What moves?"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "What moves?"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "What moves?"}),
}
EXTREMES = (
    "-1", "0", "1", "2147483647", "2147483648", "9223372036854775808", "18446744073709551615", "18446744073709551616",
    "1" + "0" * 400, "1e-320", "5e-324", "1e-46", "-0.0", "1e30", "1e308", "1e400", "-1e308", "0.5", "NaN", "Infinity",
)  # fmt: skip
IN_LISTS = ("stop_token_ids", "logit_bias", "timestamps_s")


def bodies(path: str) -> Iterator[tuple[str, str, str]]:
    """Yields (field, number, body): each field with each number, whatever its type; numbers in lists and maps too."""
    model, base = ROUTES[path]
    start = json.dumps(base)[:-1]
    for name, field in model.model_fields.items():
        name = field.alias or name
        if name in base:
            continue
        for number in EXTREMES:
            yield name, number, f'{start}, "{name}": {number}}}'
    for number in EXTREMES:
        yield "stop_token_ids", number, f'{start}, "stop_token_ids": [{number}]}}'
        yield "logit_bias", number, f'{start}, "logit_bias": {{"5": {number}}}}}'
        yield "logit_bias", number, f'{start}, "logit_bias": {{"{number}": 1}}}}'


@pytest.mark.slow
@pytest.mark.parametrize("path", ROUTES)
async def test_no_number_reaches_the_engine_that_it_cannot_take(tmp_path: Path, path: str) -> None:
    world = World(tmp_path, metrics=False, access_log=False)
    num_asked = 0
    for name, number, body in bodies(path):
        response = await world.client.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 404, 413), f"{name}: {number}: {response.text}"
        num_asked += 1
    assert num_asked > 400
    for request in world.engine.requests:
        videos: tuple[Video, ...] = ()
        assert request.videos == videos
        assert read_request(write_request(request)) == request  # the encoding used between API and workers
        assert request.max_tokens is None or request.max_tokens < 2**31
    assert world.engine.requests


@pytest.mark.slow
async def test_nor_does_one_of_a_form(tmp_path: Path) -> None:
    world = World(tmp_path, access_log=False)
    for name in VideoChatForm.model_fields:
        if name in ("prompt", "video"):
            continue
        for number in EXTREMES:
            fields = {"prompt": "x", name: number}
            response = await world.client.post(URL, data=fields, files={"video": ("a", CLIP_BYTES)})
            assert response.status_code in (200, 400, 404, 413), f"{name}: {number}: {response.text}"
    for request in world.engine.requests:
        close_fds(write_request(request))


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "num_frames", "max_frames", "min_tokens"])
async def test_the_refusal_names_the_field_and_the_bound(tmp_path: Path, field: str) -> None:
    world = World(tmp_path)
    body = {"messages": [{"role": "user", "content": "x"}], field: 2**64}
    response = await world.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert "2147483647" in response.json()["error"]["message"]
