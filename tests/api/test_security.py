"""Requests without a key and pages of other sites are refused; neither answers nor logs contain secrets."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from tests.api.world import DATA_URL, FILE, World

pytestmark = [pytest.mark.api, pytest.mark.anyio]

KEY = "the-key-0123456789abcdef"
OTHER = "another-key-0123456789"
AS_US = {"authorization": f"Bearer {KEY}"}
OPEN = {"/health", "/health/live", "/health/ready"}
PAGE = "https://app.example"
_HEADERS = "authorization,content-type,x-stainless-lang"


def paths_of(world: World) -> dict[str, set[str]]:
    """Every path with its methods: those of the OpenAPI document and the undocumented routes."""
    documented = {path: set(methods) for path, methods in world.app.openapi()["paths"].items()}
    hidden = {route.path: set(route.methods or ()) for route in world.app.routes if isinstance(route, APIRoute)}
    return {**hidden, **documented, "/openapi.json": {"get"}, "/docs": {"get"}, "/nowhere": {"get"}}


async def test_every_route_but_the_health_checks_asks_for_a_key(tmp_path: Path) -> None:
    world = World(tmp_path, keys=[KEY, OTHER])
    paths = paths_of(world)
    assert {"/v1/video-chat", "/v1/chat/completions", "/v1/videos", "/v1/videos/{video_id}", "/metrics"} < set(paths)
    for path, methods in paths.items():
        for method in methods:
            response = await world.client.request(method, path)
            if path in OPEN:
                assert response.status_code == 200
                continue
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert (await world.client.request(method, path, headers=AS_US)).status_code != 401, path


@pytest.mark.parametrize(
    "header", ["", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer " + "x" * 5000, "Bearer é"]
)
async def test_a_wrong_key_is_no_key_and_is_not_repeated(tmp_path: Path, header: str) -> None:
    world = World(tmp_path, keys=[KEY])
    response = await world.client.get("/v1/models", headers={b"authorization": header.encode("latin-1")})
    assert response.status_code == 401
    assert KEY not in response.text
    assert "xxx" not in response.text


async def test_without_a_key_nothing_is_read_decoded_or_counted_as_admitted(tmp_path: Path) -> None:
    world = World(tmp_path, keys=[KEY])
    response = await world.client.post("/v1/video-chat", files=FILE, data={"prompt": "x"})
    assert response.status_code == 401
    assert (world.decoder.requests, world.leftovers, world.admission.num_admitted) == ([], [], 0)


async def test_metrics_can_be_left_open(tmp_path: Path) -> None:
    world = World(tmp_path, keys=[KEY], metrics_open=True)
    assert (await world.client.get("/metrics")).status_code == 200
    assert (await world.client.get("/v1/models")).status_code == 401


async def test_a_path_that_only_looks_open_is_not(tmp_path: Path) -> None:
    world = World(tmp_path, keys=[KEY])
    for path in ("/health/live/", "//health/live", "/health/live/../../v1/models", "/health/live%2f", "/HEALTH/LIVE"):
        response = await world.client.get(path)
        assert response.status_code in (401, 200), path
        assert response.status_code == 401 or response.json() == {"status": "ok", "reasons": []}


async def test_pages_of_other_sites_are_not_allowed_unless_named(tmp_path: Path) -> None:
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": _HEADERS}
    closed, named = World(tmp_path), World(tmp_path, keys=[KEY], cors_origins=(PAGE,))
    for response in (
        await closed.client.options("/v1/video-chat", headers=asks),
        await closed.client.get("/v1/models", headers={"origin": PAGE}),
        await named.client.options("/v1/video-chat", headers={**asks, "origin": "https://evil.example"}),
        await named.client.get("/v1/models", headers={**AS_US, "origin": "https://evil.example"}),
    ):
        assert "access-control-allow-origin" not in response.headers
    preflight = await named.client.options("/v1/video-chat", headers=asks)  # browsers send a preflight without a key
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    # OpenAI's own client sends x-stainless-... headers. Allowing them is safe: access needs a key, and pages have none.
    assert preflight.headers["access-control-allow-headers"] == _HEADERS
    assert {"GET", "POST", "DELETE"} <= set(preflight.headers["access-control-allow-methods"].split(", "))
    refused = await named.client.get("/v1/models", headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    readable = refused.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "x-seed", "retry-after", "x-should-retry"} <= set(readable)
    assert "access-control-allow-credentials" not in preflight.headers


@pytest.mark.parametrize("path", ["/health/live", "/nowhere", "/v1/video-chat", "/v1/videos", "/metrics"])
async def test_answers_are_inert_and_kept_by_no_cache(tmp_path: Path, path: str) -> None:
    headers = (await World(tmp_path).client.get(path)).headers
    assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"


async def test_docs_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    world = World(tmp_path)
    page = await world.client.get("/docs")
    assert page.status_code == 200
    assert "://" not in page.text
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name, kind in (("swagger-ui-bundle.js", "text/javascript"), ("swagger-ui.css", "text/css")):
        assert f"/docs/{name}" in page.text
        asset = await world.client.get(f"/docs/{name}")
        assert (asset.status_code, asset.headers["content-type"].partition(";")[0]) == (200, kind)
        assert len(asset.content) > 100_000
        assert asset.headers["cache-control"] == "max-age=86400"
    for name in ("__init__.py", "..%2fmain.py", "favicon-32x32.png", "%2e%2e"):
        assert (await world.client.get(f"/docs/{name}")).status_code == 404


async def test_the_log_names_callers_and_never_keys_questions_or_videos(tmp_path: Path, log: io.StringIO) -> None:
    world = World(tmp_path, keys=[KEY])
    chat: dict[str, Any] = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "video_url", "video_url": {"url": DATA_URL}},
                    {"type": "text", "text": "hush-hush"},
                ],
            }
        ]
    }
    await world.client.post("/v1/chat/completions", json=chat, headers=AS_US)
    await world.client.post("/v1/videos?key=hush-hush", files=FILE, headers=AS_US)
    await world.client.post("/v1/video-chat", json={"prompt": "hush-hush", "speculation": "hush-hush"}, headers=AS_US)
    await world.client.get("/v1/models", headers={"authorization": "Bearer wrong-key-hush-hush"})
    text = log.getvalue()
    assert not [secret for secret in (KEY, "hush", "squ", DATA_URL[30:60], "passwd") if secret in text]
    (refused,) = (json.loads(line) for line in text.splitlines() if '"request refused"' in line)
    assert (refused["level"], refused["code"], refused["param"]) == ("info", "invalid_request", "speculation")
    answered = [json.loads(line) for line in text.splitlines() if '"answered"' in line]
    callers = {entry.get("caller") for entry in answered if "path" in entry}
    assert len(callers) == 2
    assert None in callers
