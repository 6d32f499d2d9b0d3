"""Structured output as clients request it: becomes one grammar, or a refusal that names the field."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from vidspec_models.grammar import GrammarCompiler, GrammarError, GrammarMask
from vidspec_models.loading.spec import ModelSpec, model_path
from vidspec_models.request import SamplingParams
from vidspec_models.sampling import CoupledSampler
from vidspec_service.api.grammars import checker, fork_server
from vidspec_service.api.grammars.checker import CheckResult, GrammarChecker
from vidspec_service.api.grammars.grammar import MAX_GRAMMAR, Grammar
from vidspec_service.api.limits.admission import ANYONE
from vidspec_service.api.schemas.structured_output import StructuredOutput
from vidspec_service.errors import CapacityError, InvalidRequest
from vidspec_service.forking import ForkServer

pytestmark = pytest.mark.anyio
END = 2
MOST_TOKENS = 3000
FORMATS = jsonschema.FormatChecker(["email", "ipv4", "uuid"])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with closing(ForkServer(fork_server.__name__, is_bare=True)) as forks:
        forks.start()  # from this thread, which lives as long
        yield forks


@pytest.fixture
def check(forks: ForkServer) -> GrammarChecker:
    return GrammarChecker(forks)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_path(ModelSpec(path="bundled", role="target")))


@cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), frozenset({END}), len(tokenizer()))


def grammar(**fields: Any) -> Grammar:
    found = StructuredOutput.model_validate_json(json.dumps(fields), strict=True).grammar
    assert found is not None
    return found


def by_schema(schema: Any) -> Grammar:
    return grammar(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def allows(asked: Grammar, text: str) -> bool:
    of_bytes = LLTokenizer("byte")
    tokens = of_bytes.tokenize_str(text)
    return LLMatcher(of_bytes, asked.text).validate_tokens(tokens) == len(tokens)


def babble(mask: GrammarMask, seed: int) -> str:
    """The output of a model that knows no JSON; it prefers closing brackets and quotes, or it would never end."""
    generator = torch.Generator().manual_seed(seed)
    sampler = CoupledSampler(SamplingParams(temperature=1.0, seed=seed), (mask,))
    closing = [END, *(token for text in ('"', "}", "]", "e", "0") for token in tokenizer().encode(text))]
    ids = list[int]()
    while not ids or ids[-1] != END:
        logits = torch.randn(1, len(tokenizer()), generator=generator)
        logits[0, closing] += 4.0
        ids += sampler.sample(logits, ids)
        mask.check()
        assert len(ids) < MOST_TOKENS
    return str(tokenizer().decode(ids, skip_special_tokens=True))


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object"},
    "any value": {},
    "true": {"additionalProperties": True},
    "enum": {"enum": ["a", 1, None, True, {"b": [2]}]},
    "const": {"const": {"x": 1}},
    "types": {"type": ["integer", "null"]},
    "integer bounds": {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    "number bounds": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "boolean": an_object(a={"type": "boolean"}),
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "long": {"type": "string", "maxLength": 2000},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    "pattern inside": {"type": "string", "pattern": "ab+c", "maxLength": 40},
    "time": {"type": "string", "format": "time"},
    "email": {"type": "string", "format": "email"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "unknown format": {"type": "string", "format": "colour"},
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False},
    "required": an_object(a={"type": "integer"}, b={"type": "string", "maxLength": 4}),
    "optional": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
    "required but not described": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "b"]},
    "more properties": {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"const": 1}},
    "patternProperties": {"type": "object", "patternProperties": {"^x": {"type": "null"}}},
    "minProperties": {"type": "object", "minProperties": 2},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "anyOf": {"anyOf": [{"type": "null"}, an_object(a={"type": "null"})]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "oneOf overlapping": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 0}},
    "uniqueItems": {"type": "array", "items": {"type": "null"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "$ref": {**an_object(a={"$ref": "#/$defs/b"}), "$defs": {"b": {"type": "boolean"}}},
    "definitions": {**an_object(a={"$ref": "#/definitions/b"}), "definitions": {"b": {"const": "é"}}},
    "recursion": {**an_object(next={"anyOf": [{"type": "null"}, {"$ref": "#"}]})},
    "a tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": an_object(name={"enum": ["a", "b"]}, nodes={"type": "array", "maxItems": 1,
                                                                       "items": {"$ref": "#/$defs/node"}})},
    },
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "description": "d", "default": 1,
        "examples": [2], "type": "integer", "deprecated": True,
    },
    "draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer", "minimum": 0},
    "rules that demand nothing": {
        "type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {
            "type": "array", "items": {"type": "object", "propertyNames": {}}, "uniqueItems": False,
        }
    },
    "data that looks like them": {"enum": [{"uniqueItems": False}]},
    "names that look like them": an_object(uniqueItems={"type": "null"}, propertyNames={"type": "string"}),
    "quotes": {"enum": ['a"b', "c\\d", "e\nf", "g/h", "\u20ac"]},
    "anchor": {**an_object(a={"$ref": "#here"}), "$defs": {"b": {"$anchor": "here", "type": "boolean"}}},
    "escaped place": {**an_object(a={"$ref": "#/$defs/x~1y%25"}), "$defs": {"x/y%": {"type": "boolean"}}},
    "beside $ref": {"$ref": "#/$defs/b", "minimum": 3, "$defs": {"b": {"type": "integer", "maximum": 5}}},
    "both ways to one place": {
        "$defs": {"n": {"type": "integer"}}, "allOf": [an_object(a={"$ref": "#/$defs/n"}), {"type": "object"}],
    },
    "no name": an_object(**{"": {"type": "null"}, "a\nb": {"type": "null"}, "$ref": {"type": "null"}}),
    "no such type": {"type": "colour"},
    "false": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "overlapping patterns": {"patternProperties": {"^a": {"type": "null"}, "b": {"type": "null"}}},
    "unevaluatedProperties": {**an_object(a={"type": "null"}), "unevaluatedProperties": False},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "a number of digits": {"type": "number", "multipleOf": 1.2345678899999998},
    "an integer that is too large": {"const": -18446744073709551615},
    "$dynamicRef": {"$dynamicRef": "#node", "$defs": {"a": {"$dynamicAnchor": "node", "type": "null"}}},
    "no such place": {"$ref": "#/nowhere"},
    "elsewhere": {"$ref": "https://example.com/schema.json"},
    "nothing": {"enum": []},
    "contradiction": {"type": "string", "minLength": 3, "maxLength": 1},
    "no regex": {"type": "string", "pattern": "("},
    "half an escape": an_object(a={"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^a\\"}]}),
    "half an escape of a name": {"type": "object", "patternProperties": {"^a\\": {"type": "null"}}},
    "a whole escape": {"type": "string", "pattern": "^a\\\\$", "default": {"pattern": "\\"}},
    "classes of characters": {"type": "string", "pattern": "^[-\\[\\]&~][^^-][a-z&~-]$"},
    "a class of classes": {"type": "string", "pattern": "^[" + 999 * "a-z" + "&&[aeiou]]$"},
    "a class without classes": an_object(a={"patternProperties": {"^[+--]": {}}}),
    "a bracket first in its class": {"type": "string", "pattern": "^[^]a]$"},
    "integers that doubles have": {
        "anyOf": [{"enum": [2**53, [-(2**53)]]}, {"type": "integer", "minimum": 2**63 - 5, "maximum": 2**63 - 1}],
    },
    "an integer that doubles have not": {"enum": [1, {"a": [2**53 + 1]}]},
    "a negative integer that doubles have not": {"const": -(2**53) - 1},
    "a whole number that is written in digits": {"const": 1e300},
    "a rounded maximum": {"type": "integer", "minimum": 0, "maximum": 2**53 + 3},
    "a rounded maximum of numbers": {"type": "number", "minimum": 2**63 - 3, "maximum": 2**63 - 1},
    "a rounded minimum": {"type": "integer", "exclusiveMinimum": 2**53 + 1},
    "a bound beyond doubles": {"type": "integer", "minimum": 10**400},
    "open ends": {"anyOf": [
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"type": "number", "exclusiveMaximum": -4},
        {"type": "number", "minimum": 2, "maximum": 2.5},
        {"type": "number", "exclusiveMinimum": 9.5, "maximum": 9.9},
        {"type": "number", "exclusiveMinimum": -9, "maximum": -8.5},
    ]},
    "an open end": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.1},
    "an upper open end": an_object(a={"type": "number", "minimum": -3.5, "exclusiveMaximum": -3}),
    "an open end of draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "exclusiveMinimum": True,
        "minimum": 3, "maximum": 3.5,
    },
    "additionalItems": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "null"}],
        "additionalItems": {"type": "boolean"},
    },
    "additionalItems beside allOf": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "additionalItems": False,
        "allOf": [{"minItems": 1}], "items": [{"type": "null"}],
    },
    "additionalItems beside prefixItems": {
        "type": "array", "prefixItems": [{"type": "null"}], "additionalItems": False,
    },
    "minProperties of what is listed": {
        **an_object(a={"type": "null"}, b={"type": "null"}), "required": ["b"], "minProperties": 2,
    },
    "minProperties of what is required": {**an_object(a={}, b={}), "additionalProperties": True, "minProperties": 2},
    "minProperties of a value": {"enum": [{"a": 1, "b": 2}, {"a": 1}], "minProperties": 2},
    "minProperties by pattern": {
        "type": "object", "patternProperties": {"^a$": {}}, "additionalProperties": False, "minProperties": 2,
    },
    "one of minProperties": {"type": "object", "minProperties": 1},
    "wrong options": {"type": "null", "x-guidance": None},
    "wrong patterns": {"type": "object", "patternProperties": 3},
}  # fmt: skip
REFUSED = [
    "unknown format", "not", "if", "uniqueItems", "contains", "dependentRequired", "no such type", "no such place",
    "false", "overlapping patterns", "unevaluatedProperties", "dependencies", "a number of digits",
    "an integer that is too large", "$dynamicRef",
    "elsewhere", "nothing", "contradiction", "no regex", "half an escape", "half an escape of a name", "wrong options",
    "wrong patterns", "a bound beyond doubles", "a class of classes", "a class without classes",
    "a bracket first in its class",
    "an integer that doubles have not", "a negative integer that doubles have not", "a rounded maximum",
    "a rounded maximum of numbers",
    "a whole number that is written in digits",
    "a rounded minimum", "an open end", "an upper open end", "an open end of draft 4", "additionalItems beside allOf",
    "additionalItems beside prefixItems", "minProperties", "minProperties by pattern",
"propertyNames", "oneOf overlapping",
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in REFUSED])
async def test_an_answer_follows_its_schema(check: GrammarChecker, name: str) -> None:
    await check.check(asked := by_schema(SCHEMAS[name]), ANYONE)
    for seed in range(3):
        text = babble(grammars().mask(asked.text), seed)
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=FORMATS)


@pytest.mark.parametrize("name", REFUSED)
async def test_a_schema_that_could_not_be_kept_to_is_refused_by_name(check: GrammarChecker, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"response_format.json_schema.schema: .{10}") as refusal:
        await check.check(by_schema(SCHEMAS[name]), ANYONE)
    assert refusal.value.param == "response_format.json_schema.schema"
    assert len(refusal.value.message) < 400


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"structured_outputs": {"json": {"const": 5}}}, "5"),
        ({"structured_outputs": {"json": '{"const": 5}'}}, "5"),
        ({"structured_outputs": {"regex": r"\d{3}-[xyz]+!"}}, r"\d{3}-[xyz]+!"),
        ({"structured_outputs": {"choice": ['red "one"', "blue\n", "\u20ac"]}}, 'red "one"|blue\n|\u20ac'),
        ({"structured_outputs": {"grammar": 'start: "a" B\nB: /x{2}/'}}, "axx"),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")'}}, "a[bc]"),
        ({"guided_json": {"const": 5}}, "5"),
        ({"guided_regex": "a{3}"}, "aaa"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a"'}, "a"),
        ({"regex": "a{3}"}, "aaa"),
        ({"ebnf": 'root ::= "a" b\nb ::= "b"'}, "ab"),
    ],
)
async def test_every_way_to_say_it_becomes_a_grammar(
    check: GrammarChecker, fields: dict[str, Any], pattern: str
) -> None:
    read = await check.check(grammar(**fields), ANYONE)
    assert re.fullmatch(pattern, babble(grammars().mask(read.text), 1), re.DOTALL)
    assert await check.check(grammar(**fields), ANYONE) == read, "what is known of it is the same"


def test_the_same_form_may_be_given_under_the_new_name_and_the_older_one() -> None:
    lark = 'start: "a" | "b"'
    said = grammar(structured_outputs={"grammar": lark}, guided_grammar=lark)
    assert said == grammar(structured_outputs={"grammar": lark})
    with pytest.raises(InvalidRequest, match=r"not structured_outputs\.grammar and guided_grammar"):
        grammar(structured_outputs={"grammar": lark}, guided_grammar='start: "c"')


def test_a_schema_and_its_text_are_the_same_form() -> None:
    schema = {"type": "object", "properties": {"shape": {"type": "string"}}}
    said = grammar(structured_outputs={"json": schema}, guided_json=json.dumps(schema))
    assert said == grammar(structured_outputs={"json": schema})


@pytest.mark.parametrize("other", [{"const": [True]}, {"const": [1.0]}])
def test_schemas_that_python_takes_for_equal_are_not_the_same_form(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="Give only one field"):
        grammar(structured_outputs={"json": {"const": [1]}}, guided_json=other)


SCENE = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}  # as pydantic writes it


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCENE}}},
        {"structured_outputs": {"json": SCENE}},
        {"guided_json": json.dumps(SCENE)},
    ],
)
def test_a_model_invents_no_properties_unless_the_schema_says_that_it_may(fields: dict[str, Any]) -> None:
    assert allows(grammar(**fields), '{"count": 2}')
    assert not allows(grammar(**fields), '{"count": 2, "more": 1}')
    assert allows(by_schema({**SCENE, "additionalProperties": True}), '{"count": 2, "more": 1}')


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_schema_with_a_number_that_json_has_not_is_refused_and_not_read_as_null(number: str) -> None:
    with pytest.raises(InvalidRequest, match=r"guided_json: .*float"):
        StructuredOutput.model_validate_json(f'{{"guided_json": {{"const": [{number}]}}}}', strict=True)


@pytest.mark.parametrize("schema", [{"type": "object"}, {"properties": {"a": {}, "b": {}}}])
@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a": 1, "b": ["x", {}]}', True),
        ('{"a":1,"b":["x",{}]}', True),
        ('{"a":  1}', False),
        ('{ "a": 1}', False),
        ('{"a": 1 , "b": 2}', False),
    ],
)
def test_json_has_one_blank_between_its_parts_or_none(schema: dict[str, Any], text: str, is_allowed: bool) -> None:
    """Both trained styles stay possible, and endless blanks are impossible."""
    assert allows(by_schema(schema), text) is is_allowed


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_plain_text_needs_no_grammar(fields: dict[str, Any]) -> None:
    assert StructuredOutput.model_validate(fields).grammar is None


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = an_object(a=schema)
    return schema


def doubled(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


def crossed(width: int) -> dict[str, Any]:
    part = {"properties": {"a": {"anyOf": [{"const": number} for number in range(width)]}}}
    return {"type": "object", "allOf": [part] * width}


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"guided_json": deep(60)},
    "too deep": {"guided_json": deep(90)},
    "a huge enum": {"guided_json": {"enum": [f"value {number}" for number in range(9000)]}},
    "many properties": {"guided_json": an_object(**{f"field {n}": {"type": "string"} for n in range(1500)})},
    "optional properties": {"guided_json": {"properties": {f"field {n}": {"type": "string"} for n in range(1500)}}},
    "doubled": {"guided_json": doubled(10)},
    "crossed": {"guided_json": crossed(20)},
    "itself": {"guided_json": {"$ref": "#"}},
    "long": {"guided_json": {"type": "string", "maxLength": 10**9}},
    "many": {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
    "many patterns": {"guided_json": {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b"} for n in range(12)]}},
    "exponential regex": {"guided_regex": "(a|b)*a(a|b){40}"},
    "nested repeats": {"guided_regex": "((((a{0,1000}){0,1000}){0,1000}){0,1000})"},
    "unicode repeats": {"guided_regex": r"\w{1,5000}\d{1,5000}"},
    "both": {"guided_regex": "(.*a.{20}b.*)(.*c.{20}d.*)(.*e.{20}f.*)"},
    "many words": {"guided_choice": [f"choice {number}" * 3 for number in range(1000)]},
    "many rules": {"guided_grammar": "\n".join(["start: r0", *(f'r{n}: r{n + 1} | "x" r0' for n in range(2000))])},
    "ambiguous": {"guided_grammar": 'start: s\ns: s s | s s s | "a" | ""'},
    "intersections": {"guided_grammar": "start: A\nA: /(.*a.{20}b.*)/ & /(.*c.{20}d.*)/ & ~/(.*e.{20}f.*)/"},
    "many intersections": {"guided_grammar": "start: A\nA: " + " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(14))},
    "blank lines": {"guided_grammar": 'root ::= "a"' + "\n" * 60_000},
    "unfinished": {"guided_grammar": 'root ::= "\\'},
    "brackets": {"guided_grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "longest": {"guided_regex": "(x|y)" * (MAX_GRAMMAR // 5 - 20)},
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_grammar_costs_a_bounded_time(check: GrammarChecker, name: str) -> None:
    """Alone on a core, none takes a worker 0.5 s, or 50 ms in one step; tests allow more, since they share cores."""
    try:
        read = await check.check(grammar(**HOSTILE[name]), ANYONE)
    except InvalidRequest:
        return
    started, slowest, ids = time.process_time(), 0.0, list[int]()
    with suppress(GrammarError):  # an error that ends only this request is fine
        try:
            mask = grammars().mask(read.text)
        finally:
            assert time.process_time() - started < 2
        used = CoupledSampler(SamplingParams(temperature=1.0, seed=1), constraint=mask)
        while len(ids) < 60 and END not in ids:
            before = time.process_time()
            ids += used.sample(torch.zeros(1, len(tokenizer())), ids)
            slowest = max(slowest, time.process_time() - before)
            mask.check()
    assert slowest < 0.5


@pytest.mark.parametrize("name", ["many intersections", "blank lines"])
async def test_a_grammar_that_takes_minutes_to_compile_or_to_read_is_refused_soon(
    check: GrammarChecker, name: str
) -> None:
    with pytest.raises(InvalidRequest, match="too much time"):
        await check.check(grammar(**HOSTILE[name]), ANYONE)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[a&&b]"},
        {"guided_grammar": "start: rule\nrule: rule"},
        {"guided_json": {"$ref": "#/$defs/itself", "$defs": {"itself": {"$ref": "#/$defs/itself"}}}},
    ],
    ids=["regex", "grammar", "schema"],
)
async def test_a_grammar_that_no_answer_can_match_is_refused(check: GrammarChecker, fields: dict[str, Any]) -> None:
    (param,) = fields
    with pytest.raises(InvalidRequest, match=f"{param}: no answer can match it"):
        await check.check(grammar(**fields), ANYONE)


def test_a_regex_that_ends_within_an_escape_sequence_is_refused_and_not_shortened() -> None:
    with pytest.raises(InvalidRequest, match=r"guided_regex: .*incomplete escape sequence"):
        grammar(guided_regex="a\\\\\\")
    assert babble(grammars().mask(grammar(guided_regex="a\\\\").text), 1) == "a\\"


async def test_a_grammar_that_names_tokens_by_their_numbers_is_refused(check: GrammarChecker) -> None:
    for lark in ('start: "a" <[5]>', 'start: A <[^5-9]>\nA: /"/', 'start: "\\"" <[*]> "\\""'):
        with pytest.raises(InvalidRequest, match=r"structured_outputs.grammar: .* tokens by their numbers"):
            await check.check(grammar(structured_outputs={"grammar": lark}), ANYONE)
    for lark in ('start: "<[5]>" A // <[5]>\nA: /<\\/<[0-9]/ # <[5]>', 'root ::= "<[5]>" [<[]'):
        await check.check(grammar(structured_outputs={"grammar": lark}), ANYONE)


async def test_a_grammar_of_bytes_that_are_no_text_is_refused(check: GrammarChecker) -> None:
    lark = '%llguidance {{"no_forcing": false,\n"allow_invalid_utf8" : {}}}\nstart: /[^x]+/'
    with pytest.raises(InvalidRequest, match="ebnf: it may not allow_invalid_utf8"):
        await check.check(grammar(ebnf=lark.format("true")), ANYONE)
    commented = lark.format("false") + '// %llguidance {"allow_invalid_utf8": true}'
    await check.check(grammar(ebnf=commented), ANYONE)


async def test_a_grammar_that_gets_too_long_as_lark_is_refused(check: GrammarChecker) -> None:
    with pytest.raises(InvalidRequest, match=f"guided_grammar: as Lark it may have at most {MAX_GRAMMAR} characters"):
        await check.check(grammar(guided_grammar='root ::= "a"' + '|"a"' * 12_000), ANYONE)


def test_a_schema_that_is_too_long_is_refused_before_it_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = by_schema({"enum": ["é" * 65_000]})  # not 390,000 escapes
    assert len(schema.text) > 65_000
    monkeypatch.setattr("vidspec_service.api.grammars.grammar._schemas_in", None)
    with pytest.raises(InvalidRequest, match=f"schema: it may have at most {MAX_GRAMMAR} characters"):
        by_schema({"enum": ["é" * 66_000]})


@asynccontextmanager
async def own_process() -> AsyncIterator[tuple[GrammarChecker, psutil.Process]]:
    """A checker, and the process that forks its children."""
    others = set(psutil.Process().children())
    with closing(GrammarChecker()) as check:
        await check.check(grammar(guided_regex="before"), ANYONE)
        started = set(psutil.Process().children()) - others
        (forking,) = (each for each in started if fork_server.__name__ in each.cmdline())
        yield check, forking


async def test_the_process_that_grammars_are_tried_in_goes_first_when_memory_runs_out_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with own_process() as (check, forking):
        assert oom_score(forking) == 1000
        forking.suspend()  # as on a machine that has no time for it
        with monkeypatch.context() as hurry:
            hurry.setattr(checker, "_TIMEOUT_S", 0.05)
            with pytest.raises(CapacityError):
                await check.check(grammar(guided_regex="meanwhile"), ANYONE)
        forking.kill()
        for regex in ("after", "meanwhile"):
            await check.check(grammar(guided_regex=regex), ANYONE)


@pytest.mark.parametrize("lost", ["the child, as when memory runs out", "both"])
async def test_a_grammar_whose_trial_was_killed_is_tried_once_more(lost: str) -> None:
    rules = ["start: r0", *(f'r{n}: r{n + 1} | "x" r0' for n in range(2000)), 'r2000: "y"']  # takes 0.1 s
    async with own_process() as (check, forking):
        asking = asyncio.ensure_future(check.check(grammar(guided_grammar="\n".join(rules)), ANYONE))
        limits = list[Any]()
        while not (asking.done() or limits):
            await asyncio.sleep(0)
            with suppress(psutil.NoSuchProcess):
                for child in forking.children():
                    if sum(child.cpu_times()[:2]):
                        limits = [child.rlimit(kind) for kind in (psutil.RLIMIT_AS, psutil.RLIMIT_CPU)]
                        (forking if lost == "both" else child).kill()
        await asking
    assert limits in ([], [(2 * 1024**3,) * 2, (1, 2)]), "as docs/security.md has them; or it was over too soon"


def oom_score(process: psutil.Process) -> int:
    return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())


async def test_what_was_checked_is_known_by_its_text(check: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = grammar(guided_regex="a+"), grammar(guided_regex="(")
    await check.check(good, ANYONE)
    with pytest.raises(InvalidRequest, match="unclosed"):
        await check.check(bad, ANYONE)
    monkeypatch.setattr(check, "check_in_child", None)  # no other child may start
    await check.check(good, ANYONE)
    with pytest.raises(InvalidRequest, match=r"^structured_outputs.regex: .*unclosed"):
        await check.check(grammar(structured_outputs={"regex": "("}), ANYONE)


def longest_hold_s(schemas: list[Any]) -> float:
    """The longest time for which another thread of the process could not run while schemas were read and compiled."""
    longest, is_over, compiler = (
        0.0,
        threading.Event(),
        GrammarCompiler(tokenizer(), frozenset({END}), len(tokenizer())),
    )

    def watch() -> None:
        nonlocal longest
        began, used = time.perf_counter(), time.process_time()
        while not is_over.wait(0.001):
            longest = max(longest, min(time.perf_counter() - began - 0.001, time.process_time() - used))
            began, used = time.perf_counter(), time.process_time()

    watching = threading.Thread(target=watch)
    watching.start()
    for schema in schemas:
        compiler.mask(by_schema(schema).text)
    is_over.set()
    watching.join()
    return longest


def test_no_schema_holds_up_what_else_the_process_does() -> None:
    """Neither the API's event loop while the schema is read, nor a worker's loop while it is compiled."""
    large = an_object(**{f"property {number}": {"enum": [*range(number, number + 10)]} for number in range(500)})
    schemas = [large, *(schema for name, schema in SCHEMAS.items() if name not in REFUSED)]
    # Several tries, since other processes may use the machine.
    assert any(longest_hold_s(schemas) < 0.05 for _ in range(4))


async def test_requests_that_leave_free_their_place_in_the_line(
    check: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, may_end, started = check.check_in_child, threading.Event(), list[str]()

    def held(grammar: Grammar) -> CheckResult:
        started.append(grammar.text)
        assert may_end.wait(10)
        return original(grammar)

    monkeypatch.setattr(check, "check_in_child", held)
    waiting = [asyncio.ensure_future(check.check(grammar(guided_regex=f"a{{{n}}}"), ANYONE)) for n in range(12)]
    while not started:  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.01)
    for task in waiting:
        task.cancel()
    may_end.set()
    await check.check(grammar(guided_regex="b"), ANYONE)
    assert len(started) <= 3, "two at once, and the last"


async def test_a_trial_that_fails_after_its_client_has_left_is_no_unhandled_exception(
    check: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    unhandled, has_begun, may_end = list[dict[str, Any]](), threading.Event(), threading.Event()

    def too_busy(_: Grammar) -> CheckResult:
        has_begun.set()
        assert may_end.wait(10)
        raise CapacityError("too busy")

    monkeypatch.setattr(check, "check_in_child", too_busy)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    asking = asyncio.ensure_future(check.check(grammar(guided_regex="a"), ANYONE))
    assert await asyncio.to_thread(has_begun.wait, 10)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    may_end.set()
    monkeypatch.undo()
    await check.check(grammar(guided_regex="b"), ANYONE)
    del asking  # which holds the trial
    gc.collect()
    assert unhandled == []


async def test_a_flood_of_grammars_delays_another_caller_by_what_is_being_tried_only(
    check: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, started = threading.Semaphore(0), list[str]()

    def held(grammar: Grammar) -> CheckResult:
        started.append("theirs" if "theirs" in grammar.text else "mine")
        assert may_end.acquire(timeout=10)
        return CheckResult()

    async def until_started(count: int) -> None:
        async with asyncio.timeout(5):
            while len(started) < count:  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.005)

    monkeypatch.setattr(check, "check_in_child", held)
    flood = [asyncio.ensure_future(check.check(grammar(guided_regex=f"mine{n}"), "mine")) for n in range(8)]
    await until_started(2)
    theirs = asyncio.ensure_future(check.check(grammar(guided_regex="theirs"), "theirs"))
    await asyncio.sleep(0)
    for leaving in flood[:2]:  # trials that run keep their places until they are done
        leaving.cancel()
    await asyncio.sleep(0.02)
    assert len(started) == 2
    for count in (3, 4):
        may_end.release()
        await until_started(count)
    assert "theirs" in started[2:4]
    for _ in range(20):
        may_end.release()
    await asyncio.gather(theirs, *flood[2:])
