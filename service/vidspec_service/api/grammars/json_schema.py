"""JSON schemas as llguidance follows them exactly: what it would accept and follow in another way is refused here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vidspec_service.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in the stubs only

# Separators as regular expressions: one space, as `json.dumps` writes, or none, as a model may have learnt; a model
# that may not write what it has learnt goes astray. If any number of spaces were allowed, it might never stop.
_DEFAULTS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # keywords: schemas by name
# What some generators of schemas write although it demands nothing; llguidance refuses these keywords with any value.
_EMPTY_RULES = [("propertyNames", {"type": "string"}), ("propertyNames", {}), ("uniqueItems", False)]
_NO_SCHEMAS = frozenset({"enum", "const", "default", "examples", "x-guidance"})  # keywords: data


def exact(param: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema as llguidance follows it exactly. Raises InvalidRequest where it would follow another."""
    options = schema.get("x-guidance", {})
    try:
        json.dumps(schema, allow_nan=False)
        if not isinstance(options, dict):
            raise ValueError("x-guidance should be an object")
        for each in schemas_in(schema):
            _check_patterns(each)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None
    return {**_without_empty_rules(schema), "x-guidance": {**_DEFAULTS, **options}}


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The JSON schema and all within it."""
    if isinstance(schema, list):
        for each in schema:
            yield from schemas_in(each)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in NAMED_SCHEMAS and isinstance(value, dict):
                yield from schemas_in(list(value.values()))
            elif key not in _NO_SCHEMAS:
                yield from schemas_in(value)


def check_regex(regex: str) -> None:
    """Raises ValueError if it ends within an escape sequence: llguidance would drop the last backslash."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise ValueError("regex parse error: incomplete escape sequence at its end")


def _check_patterns(schema: dict[str, Any]) -> None:
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            check_regex(pattern)


def _without_empty_rules(schema: Any) -> Any:
    """The JSON schema without rules that demand nothing."""
    if isinstance(schema, list):
        return [_without_empty_rules(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_empty_rules(each) for name, each in value.items()}
        if key in NAMED_SCHEMAS and isinstance(value, dict)
        else value
        if key in _NO_SCHEMAS
        else _without_empty_rules(value)
        for key, value in schema.items()
        if (key, value) not in _EMPTY_RULES
    }
