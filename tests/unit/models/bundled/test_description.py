"""Descriptions as JSON: valid by the published schema, and parsing gives back the facts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from vidspec_models.bundled.captions import scene_facts
from vidspec_models.bundled.description import DESCRIPTION_SCHEMA, describe, parse_description
from vidspec_models.bundled.scene import sample_scene


def test_facts_come_back_from_every_description() -> None:
    for seed in range(300):
        scene = sample_scene(seed)
        assert parse_description(describe(scene)) == scene_facts(scene)


def test_a_description_is_compact_and_in_the_schemas_order() -> None:
    text = describe(sample_scene(7))
    assert " " not in text
    said = json.loads(text)
    assert list(said) == list(DESCRIPTION_SCHEMA["properties"])
    assert list(said["objects"][0]) == list(DESCRIPTION_SCHEMA["properties"]["objects"]["items"]["properties"])


def test_a_description_can_be_said_under_its_own_schema() -> None:
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(DESCRIPTION_SCHEMA), defaults={"item_separator": ", ", "key_separator": ": "}
    )
    for seed in range(50):
        matcher, said = LLMatcher(LLTokenizer("byte"), grammar), describe(sample_scene(seed)).encode()
        assert matcher.try_consume_tokens(list(said)) == len(said)
        assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ('"teal"', '"beige"'),
        ('"texture":"dotted",', ""),
        ('"letters":[', '"more":1,"letters":['),
        ('"objects":[{', '"objects":[[],{'),
        ("}]}", "}]"),
        ('"small"', "3"),
    ],
)
def test_what_the_schema_forbids_states_nothing(part: str, instead: str) -> None:
    text = describe(sample_scene(7))
    assert part in text
    assert parse_description(text.replace(part, instead, 1)) is None


def test_the_published_schema_is_this_one() -> None:
    published = Path(__file__).parents[4] / "docs" / "description.schema.json"
    assert json.loads(published.read_text()) == DESCRIPTION_SCHEMA
