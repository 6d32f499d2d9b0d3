"""Grammar: what an answer must look like, made from what the fields of a body say.

JSON schemas are made as llguidance follows them exactly: what it would accept and follow in another way is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from llguidance import GrammarFormat, LLMatcher

from vidspec_service.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in the stubs only

Constraint = tuple[str, str, Any]  # field of the body, kind of its value ("json", "regex", ...), the value

# Separators as regular expressions: one space, as `json.dumps` writes, or none, as a model may have learnt; a model
# that may not write what it has learnt goes astray. If any number of spaces were allowed, it might never stop.
_DEFAULTS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # keywords: schemas by name
# What some generators of schemas write although it demands nothing; llguidance refuses these keywords with any value.
_EMPTY_RULES = [("propertyNames", {"type": "string"}), ("propertyNames", {}), ("uniqueItems", False)]
_NO_SCHEMAS = frozenset({"enum", "const", "default", "examples", "x-guidance"})  # keywords: data
_ESCAPED = re.compile(r"\\.", re.DOTALL)
# To Rust, [[a-z]&&[^b]] is an intersection and []a] has two characters; to JavaScript they are something else.
_CLASS_OF_CLASSES = re.compile(r"\[\^?(?:\]|[^\]]*?(?:\[|&&|--|~~))")
_SCHEMA_LISTS = frozenset({"anyOf", "prefixItems", "items"})
# Keywords that can name properties; a schema is closed where `properties` is the only one of them
_CLOSABLE = frozenset({"properties", "patternProperties", "unevaluatedProperties", "anyOf", "oneOf", "$ref"})
_IN_PLACE = frozenset({"const", "enum", "allOf", "anyOf", "oneOf", "$ref"})
_UPPER = ("maximum", "exclusiveMaximum")
_LOWER = ("minimum", "exclusiveMinimum")
MAX_GRAMMAR = 64 * 1024  # characters
_MOST_EXACT = 2**53  # llguidance reads numbers as doubles


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like, and the field of the body that says so."""

    text: str
    param: str
    spelt: str | None = None  # `text` with the model's own tokens spelt as strings; None: `text` has no such tokens
    form: GrammarFormat = "llguidance"  # of `text`; a client's Lark or GBNF ("grammar") is only parsed when it is tried


def one_grammar(constraints: Sequence[Constraint]) -> Grammar:
    """The grammar that all constraints say. Raises InvalidRequest if they differ, or cannot be made a grammar.

    The same grammar in two fields is no contradiction: guidance sends it under vLLM's new name and the older one.
    """
    first, *others = constraints
    for other in others:
        if json.dumps(other[1:], sort_keys=True) != json.dumps(first[1:], sort_keys=True):  # for `==`, 1 is True
            both = f"{first[0]} and {other[0]}"
            raise InvalidRequest(f"Give only one field for the form of the answer, not {both}.", param=other[0])
    return _to_grammar(*first)


def _to_grammar(param: str, kind: str, value: Any) -> Grammar:
    if kind == "grammar":
        return Grammar(value, param, form="grammar")
    spelt = None
    try:
        if kind == "json":
            text = LLMatcher.grammar_from_json_schema(exact(param, value))
        elif kind == "choice":
            text = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
        elif kind == "tools":
            text, spelt = map(LLMatcher.grammar_from_lark, value)
        else:
            _check_regex(value)
            text = LLMatcher.grammar_from_regex(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {short(str(error))}", param=param) from None
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequest(f"{param} may have at most {MAX_GRAMMAR} characters as a grammar.", param=param)
    return Grammar(text, param, spelt)


def short(message: str) -> str:
    """What llguidance says, in one line of bounded length."""
    return " ".join(message.split())[:300]


def exact(param: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema as llguidance follows it exactly, closed. Raises InvalidRequest where it would follow another.

    *Closed*: no properties come that it does not name or explicitly allow. Models would invent some.
    """
    options = schema.get("x-guidance", {})
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        if len(text) > MAX_GRAMMAR:  # before the checks, which take a second for a large one that is nested deeply
            raise ValueError(f"it may have at most {MAX_GRAMMAR} characters")
        if not isinstance(options, dict):
            raise ValueError("x-guidance should be an object")
        if not any(map(_is_in_parts, _schemas_in(schema))):
            schema = _closed(schema)
        for each in _schemas_in(schema):
            _check_patterns(each)
            _check_integers(each)
            _check_open_ends(each)
            _check_items(each)
            _check_count(each)
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None
    return {**_without_empty_rules(schema), "x-guidance": {**_DEFAULTS, **options}}


def _schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The JSON schema and all within it."""
    if isinstance(schema, list):
        for each in schema:
            yield from _schemas_in(each)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in _NAMED_SCHEMAS and isinstance(value, dict):
                yield from _schemas_in(list(value.values()))
            elif key not in _NO_SCHEMAS:
                yield from _schemas_in(value)


def _is_in_parts(schema: dict[str, Any]) -> bool:
    """Whether the properties of one object are named in several places: each, if closed, would shut out the others'."""
    options = schema.get("anyOf")
    parts = [each for each in options if isinstance(each, dict)] if isinstance(options, list) else []
    has_part = "$ref" in schema or any(each.keys() & _CLOSABLE for each in parts)
    return "allOf" in schema or (has_part and len(schema.keys() & _CLOSABLE) > 1)


def _closed(schema: Any) -> Any:
    """The schema, with `additionalProperties: false` wherever it names its properties, and says nothing of others."""
    if not isinstance(schema, dict):
        return schema
    found = {
        key: {name: _closed(each) for name, each in value.items()}
        if key in _NAMED_SCHEMAS and isinstance(value, dict)
        else [_closed(each) for each in value]
        if key in _SCHEMA_LISTS and isinstance(value, list)
        else _closed(value)
        if key in {"items", "additionalItems", "additionalProperties"}
        else value
        for key, value in schema.items()
    }
    return {"additionalProperties": False, **found} if _names_all(found) else found


def _names_all(schema: dict[str, Any]) -> bool:
    """Whether `properties` is all that names properties; `required` may also name others, of any value."""
    named, required = schema.get("properties"), schema.get("required")
    others = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
    return schema.keys() & _CLOSABLE == {"properties"} and isinstance(named, dict) and others <= named.keys()


def _check_regex(regex: str) -> None:
    """Raises ValueError if it ends within an escape sequence: llguidance would drop the last backslash."""
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise ValueError("regex parse error: incomplete escape sequence at its end")


def _check_patterns(schema: dict[str, Any]) -> None:
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            _check_regex(pattern)
            if found := _CLASS_OF_CLASSES.search(_ESCAPED.sub("..", pattern)):
                part = pattern[slice(*found.span())][:80]
                raise ValueError(f"pattern: {part} has another meaning in JSON Schema")


def _check_integers(schema: dict[str, Any]) -> None:
    for key in ("const", "enum"):
        if any(abs(each) > _MOST_EXACT for each in _numbers_in(schema.get(key))):
            raise ValueError(f"{key}: an integer beyond 2**53 would be rounded")
    kinds = schema.get("type")
    is_whole = isinstance(kinds, str | list) and "number" not in kinds
    for key in (*_UPPER, *_LOWER):
        bound = schema.get(key)
        if not isinstance(bound, int):
            continue
        rounded = int(float(bound))
        if is_whole:  # ends at 64 bits, so that the limits of int64, which many schemas have, stay exact
            rounded = min(max(rounded, -(2**63)), 2**63 - 1)
        if rounded > bound if key in _UPPER else rounded < bound:
            raise ValueError(f"{key}: an integer beyond 2**53 would be rounded")


def _numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(each)
    elif _is_number(value):
        yield value


def _check_open_ends(schema: dict[str, Any]) -> None:
    """Of the numbers above 3 and below 3.5, llguidance would allow 3."""
    for sign, (closed, opened), others in ((1, _LOWER, _UPPER), (-1, _UPPER, _LOWER)):
        end = schema.get(closed if schema.get(opened) is True else opened)  # draft 4: with `true`, it is open
        if not _is_number(end) or end % 1 or end * sign < 0:
            continue
        if any(0 < (other - end) * sign < 1 for other in map(schema.get, others) if _is_number(other)):
            raise ValueError(f"{opened}: {end} is not kept out if the other bound differs in its decimals only")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_items(schema: dict[str, Any]) -> None:
    is_list = isinstance(schema.get("items"), list)
    if "additionalItems" in schema and ("prefixItems" in schema or (is_list and schema.keys() & _IN_PLACE)):
        raise ValueError("additionalItems beside prefixItems, anyOf and the like cannot be kept to")


def _check_count(schema: dict[str, Any]) -> None:
    """A name that the schema does not list may come twice in an answer, and counts once for whoever reads it."""
    least, required = schema.get("minProperties"), schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if is_closed or schema.keys() & {"const", "enum"} or not _is_number(least):
        return
    if least > max(1, len(required) if isinstance(required, list) else 0):
        raise ValueError("minProperties above 1 cannot be kept to, unless additionalProperties is false")


def _without_empty_rules(schema: Any) -> Any:
    """The JSON schema without rules that demand nothing."""
    if isinstance(schema, list):
        return [_without_empty_rules(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_empty_rules(each) for name, each in value.items()}
        if key in _NAMED_SCHEMAS and isinstance(value, dict)
        else value
        if key in _NO_SCHEMAS
        else _without_empty_rules(value)
        for key, value in schema.items()
        if (key, value) not in _EMPTY_RULES
    }
