"""The OpenAPI document is valid and matches what the service does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import validate
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tests.api.world import FILE, World
from vidspec_service import errors
from vidspec_service.api import errors as http_errors
from vidspec_service.api.errors import STATUS
from vidspec_service.api.schemas.chat_completions import ChatCompletionRequest
from vidspec_service.api.schemas.video_chat import VideoChat
from vidspec_service.api.schemas.videos import Video
from vidspec_service.telemetry import Metrics

pytestmark = [pytest.mark.api, pytest.mark.anyio]

ASKING = ("/v1/video-chat", "/v1/chat/completions")
INTERNAL = (errors.ServiceError, errors.EngineError, errors.VideoError, errors.ConfigError)  # clients never see these
CLIENT_ERRORS = [
    kind
    for module in (errors, http_errors)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, errors.ServiceError) and kind not in INTERNAL
]


async def document(tmp_path: Path) -> dict[str, Any]:
    response = await World(tmp_path).client.get("/openapi.json")
    assert response.status_code == 200
    loaded: dict[str, Any] = response.json()
    return loaded


async def test_the_document_is_valid_openapi(tmp_path: Path) -> None:
    validate(await document(tmp_path))


@pytest.mark.parametrize(("path", "missing"), [*((path, set()) for path in ASKING), ("/v1/videos", {404})])
async def test_every_status_a_request_can_get_is_documented(tmp_path: Path, path: str, missing: set[int]) -> None:
    responses = (await document(tmp_path))["paths"][path]["post"]["responses"]
    assert {int(status) for status in responses} == (set(STATUS.values()) | {200, 415}) - missing
    assert "Retry-After" in responses["503"]["headers"]
    assert "Retry-After" in responses["429"]["headers"]


async def test_no_validation_error_is_documented_that_only_fastapi_would_send(tmp_path: Path) -> None:
    whole = await document(tmp_path)
    assert "ValidationError" not in json.dumps(whole)
    assert set(whole["paths"]["/v1/videos/{video_id}"]["get"]["responses"]) == {"200", "400", "401", "404", "503"}


async def test_keys_are_documented_where_they_are_asked_for(tmp_path: Path) -> None:
    assert "security" not in await document(tmp_path)
    keys = ["a-key-of-16-signs"]
    world = World(tmp_path, keys=keys)
    asked = await world.client.get("/openapi.json", headers={"authorization": f"Bearer {keys[0]}"})
    operations = {path: methods["get"] for path, methods in asked.json()["paths"].items() if "get" in methods}
    assert asked.json()["security"] == [{"key": []}]
    assert asked.json()["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert [path for path, operation in operations.items() if operation.get("security") == []] == [
        "/health/live", "/health", "/health/ready",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("/v1/video-chat", {"multipart/form-data", "application/json"}),
        ("/v1/chat/completions", {"application/json"}),
        ("/v1/videos", {"multipart/form-data", "application/json"}),
    ],
)
async def test_bodies_have_a_schema_and_examples_that_obey_it(tmp_path: Path, path: str, kinds: set[str]) -> None:
    whole = await document(tmp_path)
    content = whole["paths"][path]["post"]["requestBody"]["content"]
    assert set(content) == kinds
    schema = {**content["application/json"]["schema"], "components": whole["components"]}
    assert content["application/json"]["examples"]
    for example in content["application/json"]["examples"].values():
        jsonschema.validate(example["value"], schema)


@pytest.mark.parametrize("form", ["VideoChatForm", "VideoUploadForm"])
async def test_forms_have_a_file_part_and_say_what_each_part_is(tmp_path: Path, form: str) -> None:
    parts = (await document(tmp_path))["components"]["schemas"][form]["properties"]
    assert parts["video"].get("items", parts["video"])["format"] == "binary"
    assert all(part["description"] for part in parts.values())


@pytest.mark.parametrize("path", ASKING)
async def test_the_example_answers_have_the_shape_of_the_schema(tmp_path: Path, path: str) -> None:
    whole = await document(tmp_path)
    content = whole["paths"][path]["post"]["responses"]["200"]["content"]
    schema = {**content["application/json"]["schema"], "components": whole["components"]}
    jsonschema.validate(content["application/json"]["example"], schema)


async def test_the_example_stream_ends_as_streams_do(tmp_path: Path) -> None:
    responses = (await document(tmp_path))["paths"]["/v1/video-chat"]["post"]["responses"]
    events = responses["200"]["content"]["text/event-stream"]["example"].split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert json.loads(events[-3].removeprefix("data: "))["choices"] == []


async def test_real_answers_obey_the_published_schemas(tmp_path: Path) -> None:
    world = World(tmp_path)
    whole = (await world.client.get("/openapi.json")).json()
    kept = await world.client.post("/v1/videos", files=FILE)
    part = {"type": "file", "file": {"file_id": kept.json()["id"]}}
    turn = {"role": "user", "content": [part, {"type": "text", "text": "x"}]}
    answers = {
        ("/v1/videos", "post"): kept,
        ("/v1/videos", "get"): await world.client.get("/v1/videos"),
        ("/v1/video-chat", "post"): await world.ask(),
        ("/v1/chat/completions", "post"): await world.client.post("/v1/chat/completions", json={"messages": [turn]}),
        ("/v1/models", "get"): await world.client.get("/v1/models"),
        ("/v1/videos/{video_id}", "delete"): await world.client.delete(f"/v1/videos/{kept.json()['id']}"),
    }
    for (path, method), answer in answers.items():
        assert answer.status_code == 200, path
        schema = whole["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), {**schema, "components": whole["components"]})


def test_the_api_page_tells_of_every_field_route_status_code_and_metric(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    told = {name for model in (VideoChat, ChatCompletionRequest, Video) for name in model.model_fields}
    assert [name for name in told if f"`{name}`" not in page] == []
    assert [path for path in World(tmp_path).app.openapi()["paths"] if f"{path}`" not in page] == []
    assert [status for status in STATUS.values() if f"| {status} |" not in page] == []
    assert [kind.code for kind in CLIENT_ERRORS if f"`{kind.code}`" not in page] == []
    families = text_string_to_metric_families(Metrics(CollectorRegistry()).exposition("fake-target").decode())
    ours = [family.name.removeprefix("vidspec:") for family in families if family.name.startswith("vidspec:")]
    assert ours
    assert [name for name in ours if f"`{name}" not in page] == []


async def test_what_docs_fill_in_is_whole_and_can_be_sent(tmp_path: Path) -> None:
    world = World(tmp_path)
    shown = (await world.client.get("/docs/openapi.json")).json()
    validate(shown)
    assert not re.search(r'base64,[^"]*\.\.\.', json.dumps(shown["paths"]))
    form = shown["components"]["schemas"]["VideoChatForm"]["properties"]
    assert set(list(form)[:2]) == {"video", "prompt"}
    filled_in = {name: field.get("example") for name, field in form.items()}
    assert {name: value for name, value in filled_in.items() if value} == {"prompt": "Describe the video."}
