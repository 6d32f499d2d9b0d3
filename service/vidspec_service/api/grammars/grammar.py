"""Grammar: what an answer must look like, made from what the fields of a body say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import GrammarFormat, LLMatcher

from vidspec_service.api.grammars.json_schema import MAX_GRAMMAR, check_regex, exact
from vidspec_service.errors import InvalidRequest

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
            text = LLMatcher.grammar_from_json_schema(exact(param, value))
        elif kind == "choice":
            text = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in value))
        elif kind == "tools":
            text, spelt = map(LLMatcher.grammar_from_lark, value)
        else:
            check_regex(value)
            text = LLMatcher.grammar_from_regex(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param}: {short(str(error))}", param=param) from None
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequest(f"{param} may have at most {MAX_GRAMMAR} characters as a grammar.", param=param)
    return Grammar(text, param, spelt)


def short(message: str) -> str:
    """What llguidance says, in one line of bounded length."""
    return " ".join(message.split())[:300]
