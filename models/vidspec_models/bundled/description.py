"""The true description of a scene as JSON, its published schema, and the way back to the facts.

Keys always stand in the schema's order, without whitespace: for one scene there is one text. The schema tells
llguidance so in a keyword of its own, which validators ignore. First comes what an object or a letter is told from the
others by, and what follows from something comes after it: a small model reads off one fact a word.
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
                "items": _object_of(
                    {
                        "start": _one_of(WORDS["region"]),
                        "end": _one_of(WORDS["region"]),
                        "moves": _one_of(WORDS["direction"]),
                        "shape": _one_of(WORDS["shape"]),
                        "size": _one_of(WORDS["size"]),
                        "colour": _one_of(WORDS["colour"]),
                        "last_colour": _one_of(WORDS["colour"]),
                        "visible": _one_of(WORDS["timing"]),
                    }
                ),
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
    """The description of a scene; same scene, same text."""
    facts = scene_facts(scene)
    things = [
        {
            "start": thing["start"],
            "end": thing["end"],
            "moves": thing["direction"],
            "shape": thing["shape"],
            "size": thing["size"],
            "colour": thing["colour"],
            "last_colour": thing["new_colour"] or thing["colour"],
            "visible": thing["timing"],
        }
        for thing in facts["things"]
    ]
    letters = [{"time": window, "letter": letter, "corner": corner} for letter, corner, window in facts["signs"]]
    told = {"background": facts["background"], "texture": facts["texture"], "objects": things, "letters": letters}
    return json.dumps(told, separators=(",", ":"))


def parse_description(text: str) -> Facts | None:
    """The facts a description states, as `scene_facts` names them; None where it is not valid by the schema."""
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


def _thing_facts(thing: dict[str, str]) -> dict[str, str | None]:
    return {
        "size": thing["size"],
        "colour": thing["colour"],
        "shape": thing["shape"],
        "start": thing["start"],
        "end": thing["end"],
        "direction": thing["moves"],
        "timing": thing["visible"],
        "new_colour": thing["last_colour"] if thing["last_colour"] != thing["colour"] else None,
    }


def _is_valid(value: object, schema: JsonValue) -> bool:
    """What of JSON Schema the published one uses."""
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
