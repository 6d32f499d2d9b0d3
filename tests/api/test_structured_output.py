"""Structured output over HTTP: both dialects, both formats; invalid ones are refused before a video is decoded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.chat import ask
from tests.api.world import PATIENCE_S, World
from vidspec_service.api.grammars.checker import GrammarChecker

pytestmark = [pytest.mark.api, pytest.mark.anyio]

SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "scene", "strict": True, "schema": SCHEMA}}
WAYS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": BY_SCHEMA}, '"enum":["red","blue"]'),
    ({"structured_outputs": {"json": SCHEMA}}, '"enum":["red","blue"]'),
    ({"guided_regex": "a+"}, "/a+/"),
    ({"guided_choice": ["yes", "no"]}, '"yes" | "no"'),
    ({"structured_outputs": {"grammar": 'root ::= "yes"'}}, 'start: "yes"'),
]


@pytest.mark.parametrize(("fields", "part"), WAYS)
async def test_both_dialects_and_forms_ask_the_engine_for_the_same_grammar(
    tmp_path: Path, fields: dict[str, Any], part: str
) -> None:
    world = World(tmp_path)
    form = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    for response in (await ask(world, **fields), await world.ask(**fields), await world.ask_form(**form)):
        assert response.status_code == 200, response.text
    (grammar,) = {request.grammar for request in world.engine.requests}
    assert grammar is not None
    assert part in grammar


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required with the type"),
        ({"response_format": {**BY_SCHEMA, "type": "text"}}, "response_format.json_schema", "not allowed with others"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name", "match",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema", "required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format.json_schema.schema", 'Unimplemented keys: ["not"]',
        ),
        ({"structured_outputs": {}}, "structured_outputs", "one of json, regex"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "Did you mean regex?"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "EOF while parsing an object"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "should be an object"),
        ({"guided_json": []}, "guided_json", "should be an object"),
        ({"guided_json": json.dumps({"const": "x" * 70_000})}, "guided_json", "at most 65536 characters"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice.0", ""),
        ({"structured_outputs": {"grammar": "start: WORD"}}, "structured_outputs.grammar", 'unknown name: "WORD"'),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "65536"),
        ({"guided_json": {"enum": ["x" * 9] * 8_000}}, "guided_json", "65536"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ends where its grammar ends"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "not guided_regex and guided_choice"),
        ({"response_format": BY_SCHEMA, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "one field"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object", "one field"),
    ],
)  # fmt: skip
async def test_what_cannot_be_followed_is_a_400_that_says_what_and_where(
    tmp_path: Path, fields: dict[str, Any], param: str, words: str
) -> None:
    world = World(tmp_path)
    for response in (await ask(world, **fields), await world.ask(**fields)):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
        assert len(error["message"]) < 400
    assert (world.decoder.requests, world.engine.requests, world.leftovers) == ([], [], [])


async def test_a_grammar_that_takes_too_long_ends_with_its_requests_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forever(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(GrammarChecker, "check", forever)
    async with asyncio.timeout(PATIENCE_S):
        assert (await World(tmp_path, request_timeout_s=0.05).ask(guided_regex="a+")).status_code == 504
