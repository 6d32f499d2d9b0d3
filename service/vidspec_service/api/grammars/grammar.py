"""Grammar: what an answer must look like, made from what the fields of a body say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llguidance import GrammarFormat, LLMatcher

from vidspec_service.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in the stubs only

MAX_GRAMMAR = 64 * 1024  # characters
# Separators as regular expressions: one space, as `json.dumps` writes, or none, as a model may have learnt; a model
# that may not write what it has learnt goes astray. If any number of spaces were allowed, it might never stop.
JSON_DEFAULTS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # keywords: schemas by name
# What some generators of schemas write although it demands nothing; llguidance refuses these keywords with any value.
_EMPTY_RULES = [("propertyNames", {"type": "string"}), ("propertyNames", {}), ("uniqueItems", False)]

Constraint = tuple[str, str, Any]  # field of the body, kind of its value ("json", "regex", ...), the value


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
            text = LLMatcher.grammar_from_json_schema(without_empty_rules(value), defaults=JSON_DEFAULTS)
        elif kind == "choice":
            text = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
        elif kind == "tools":
            text, spelt = map(LLMatcher.grammar_from_lark, value)
        elif (len(value) - len(value.rstrip("\\"))) % 2:  # llguidance would drop the last backslash
            raise ValueError("regex parse error: incomplete escape sequence at its end")
        else:
            text = LLMatcher.grammar_from_regex(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {short(str(error))}", param=param) from None
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequest(f"{param} may have at most {MAX_GRAMMAR} characters as a grammar.", param=param)
    return Grammar(text, param, spelt)


def without_empty_rules(schema: Any) -> Any:
    """The JSON schema without rules that demand nothing."""
    if isinstance(schema, list):
        return [without_empty_rules(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: without_empty_rules(each) for name, each in value.items()}
        if key in NAMED_SCHEMAS and isinstance(value, dict)
        else value
        if key in {"enum", "const"}
        else without_empty_rules(value)
        for key, value in schema.items()
        if (key, value) not in _EMPTY_RULES
    }


def short(message: str) -> str:
    """What llguidance says, in one line of bounded length."""
    return " ".join(message.split())[:300]
