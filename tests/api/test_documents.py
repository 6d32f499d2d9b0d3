"""The OpenAPI document is valid, and says what the service does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from openapi_spec_validator import validate
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tests.api.world import World
from vidspec_service.api.problems import STATUS
from vidspec_service.api.schemas import VideoChat
from vidspec_service.telemetry import Metrics

pytestmark = [pytest.mark.api, pytest.mark.anyio]


async def document(tmp_path: Path) -> dict[str, Any]:
    response = await World(tmp_path).client.get("/openapi.json")
    assert response.status_code == 200
    loaded: dict[str, Any] = response.json()
    return loaded


async def test_the_document_is_valid_openapi(tmp_path: Path) -> None:
    validate(await document(tmp_path))


async def test_docs_show_it(tmp_path: Path) -> None:
    response = await World(tmp_path).client.get("/docs")
    assert response.status_code == 200
    assert "/openapi.json" in response.text


async def test_every_status_a_request_can_get_is_documented(tmp_path: Path) -> None:
    responses = (await document(tmp_path))["paths"]["/v1/video-chat"]["post"]["responses"]
    assert {int(status) for status in responses} == set(STATUS.values()) | {200, 415}
    assert "Retry-After" in responses["503"]["headers"]


async def test_both_bodies_have_a_schema_and_an_example_that_obeys_it(tmp_path: Path) -> None:
    whole = await document(tmp_path)
    content = whole["paths"]["/v1/video-chat"]["post"]["requestBody"]["content"]
    assert set(content) == {"multipart/form-data", "application/json"}
    schema = {**content["application/json"]["schema"], "components": whole["components"]}
    for example in content["application/json"]["examples"].values():
        jsonschema.validate(example["value"], schema)
    form = whole["components"]["schemas"]["VideoChatForm"]["properties"]
    assert form["video"]["format"] == "binary"
    assert all(field["description"] for field in form.values())


async def test_the_example_answer_has_the_shape_of_the_schema(tmp_path: Path) -> None:
    whole = await document(tmp_path)
    content = whole["paths"]["/v1/video-chat"]["post"]["responses"]["200"]["content"]
    schema = {**content["application/json"]["schema"], "components": whole["components"]}
    jsonschema.validate(content["application/json"]["example"], schema)
    events = content["text/event-stream"]["example"].split("\n\n")
    assert events[-2] == "data: [DONE]"
    assert json.loads(events[-3].removeprefix("data: "))["choices"] == []


def test_the_api_page_tells_of_every_field_status_and_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in VideoChat.model_fields if f"`{name}`" not in page] == []
    assert [status for status in STATUS.values() if f"| {status} |" not in page] == []
    families = text_string_to_metric_families(Metrics(CollectorRegistry()).exposition().decode())
    ours = [family.name.removeprefix("vidspec:") for family in families if family.name.startswith("vidspec:")]
    assert ours
    assert [name for name in ours if f"`{name}" not in page] == []
