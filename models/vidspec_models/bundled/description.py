"""The true description of a scene as JSON, its published schema, and the parser back to facts.

Keys are always in the schema's order, without whitespace, so that a scene has exactly one text. The schema tells
llguidance so in a keyword of its own, which validators ignore. The keys that identify an object or a letter come first,
and a fact that follows from others comes after them, because a small model looks up one fact per word.
"""

from __future__ import annotations

import json
from typing import Any

from vidspec_models.bundled.captions import Facts, scene_facts
from vidspec_models.bundled.scene import CORNERS, WORDS, Scene

JsonValue = dict[str, Any]


def _object_of(properties: dict[str, JsonValue]) -> JsonValue:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def _one_of(words: tuple[str, ...]) -> JsonValue:
    return {"type": "string", "enum": list(words)}


_OBJECT_KEYS = {  # keys of an object in order -> (fact that the key states, name of its words in WORDS)
    "start": ("start", "region"),
    "end": ("end", "region"),
    "moves": ("direction", "direction"),
    "shape": ("shape", "shape"),
    "size": ("size", "size"),
    "colour": ("colour", "colour"),
    "last_colour": ("last_colour", "colour"),
    "visible": ("timing", "timing"),
}
DESCRIPTION_SCHEMA: JsonValue = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    **_object_of(
        {
            "background": _one_of(WORDS["background"]),
            "texture": _one_of(WORDS["texture"]),
            "objects": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": _object_of({key: _one_of(WORDS[words]) for key, (_, words) in _OBJECT_KEYS.items()}),
            },
            "letters": {
                "type": "array",
                "maxItems": 3,
                "items": _object_of(
                    {
                        "time": _one_of(WORDS["window"]),
                        "letter": _one_of(WORDS["letter"]),
                        "corner": _one_of(CORNERS),
                    }
                ),
            },
        }
    ),
}


def describe(scene: Scene) -> str:
    """The description of a scene; the same scene gives the same text."""
    facts = scene_facts(scene)
    known = [{**thing, "last_colour": thing["new_colour"] or thing["colour"]} for thing in facts["things"]]
    things = [{key: thing[fact] for key, (fact, _) in _OBJECT_KEYS.items()} for thing in known]
    letters = [{"time": window, "letter": letter, "corner": corner} for letter, corner, window in facts["signs"]]
    told = {"background": facts["background"], "texture": facts["texture"], "objects": things, "letters": letters}
    return json.dumps(told, separators=(",", ":"))


def parse_description(text: str) -> Facts | None:
    """The facts that a description states, named as in `scene_facts`; None if it does not match the schema."""
    try:
        said = json.loads(text)
    except ValueError:
        return None
    if not _is_valid(said, DESCRIPTION_SCHEMA):
        return None
    return {
        "background": said["background"],
        "texture": said["texture"],
        "count": len(said["objects"]),
        "things": tuple(_thing_facts(thing) for thing in said["objects"]),
        "signs": tuple((sign["letter"], sign["corner"], sign["time"]) for sign in said["letters"]),
    }


def _thing_facts(said: dict[str, str]) -> dict[str, str | None]:
    facts = {fact: said[key] for key, (fact, _) in _OBJECT_KEYS.items()}
    last = facts.pop("last_colour")
    return {**facts, "new_colour": last if last != facts["colour"] else None}


def _is_valid(value: object, schema: JsonValue) -> bool:
    """Validate with the part of JSON Schema that the published schema uses."""
    if schema["type"] == "string":
        return value in schema["enum"]
    if schema["type"] == "array":
        if not isinstance(value, list) or not schema.get("minItems", 0) <= len(value) <= schema["maxItems"]:
            return False
        return all(_is_valid(item, schema["items"]) for item in value)
    known = schema["properties"]
    if not isinstance(value, dict) or value.keys() != known.keys():
        return False
    return all(_is_valid(value[name], known[name]) for name in known)
