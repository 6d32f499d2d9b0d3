"""A grammar binds both models: the ids are the same in every mode, and every answer follows the grammar."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import EngineHarness, ask, scene_video, unsure_video
from vidspec_models.request import GenerationRequest, SamplingParams, SpeculationMode
from vidspec_service.api.schemas.structured_output import StructuredOutput
from vidspec_service.engine.types import FinishReason, TextDelta
from vidspec_service.errors import InvalidRequest

MODES = (SpeculationMode.OFF, SpeculationMode.SERIAL, SpeculationMode.PARALLEL, SpeculationMode.AUTO)
AUTO = SpeculationMode.AUTO
LAWS = (SamplingParams(), SamplingParams(temperature=0.8, seed=7))
both_laws = pytest.mark.parametrize(
    "law", [pytest.param(LAWS[0], id="greedy", marks=pytest.mark.slow), pytest.param(LAWS[1], id="temperature")]
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "objects": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "shape": {"enum": ["circle", "square", "triangle"]},
                    "word": {"type": "string", "maxLength": 12},
                    "seconds": {"type": "integer", "minimum": 0, "maximum": 60},
                },
                "required": ["shape", "word", "seconds"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["objects"],
    "additionalProperties": False,
}
PATTERN = r"(red|blue) [a-z]{3,8}, [0-9]{1,3} s\."
CHOICE = ("A red square moves left.", "A red square moves right.", "Nothing moves.")
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
REGEX = LLMatcher.grammar_from_regex(PATTERN)
ONE_OF = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in CHOICE))
LIMITED = 'start: "I see " a ". There is " b "!"\na[max_tokens=6]: /[a-z ]*/\nb[stop=/[.,]/, max_tokens=9]: /[^!]*/'
GRAMMARS: dict[str | None, str] = {"schema": JSON, "regex": REGEX, "choice": ONE_OF, "limited": LIMITED}


def question(
    name: str,
    seed: int,
    grammar: str | None,
    law: SamplingParams = LAWS[0],
    mode: SpeculationMode = SpeculationMode.AUTO,
) -> GenerationRequest:
    request = ask(name, "Describe the video.", [scene_video(seed, 2)], sampling=law, speculation=mode, max_tokens=250)
    return replace(request, grammar=None if grammar is None else GRAMMARS[grammar])


def check(grammar: str, text: str) -> None:
    if grammar == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif grammar == "regex":
        assert re.fullmatch(PATTERN, text)
    elif grammar == "limited":
        assert re.fullmatch(r"I see [a-z ]*\. There is [^!]*!", text)
    else:
        assert text in CHOICE


@both_laws
@pytest.mark.parametrize("grammar", ["schema", "regex", "choice", "limited"])
def test_every_mode_gives_the_same_ids_and_they_are_of_the_grammar(
    engine: EngineHarness, grammar: str, law: SamplingParams
) -> None:
    for seed in range(2):
        found = {mode: engine.answer(question(f"{mode}-{seed}", seed, grammar, law, mode)) for mode in MODES}
        assert len({answer.ids for answer in found.values()}) == 1, found
        answer = found[SpeculationMode.PARALLEL]
        assert answer.finished.finish_reason is FinishReason.STOP
        check(grammar, answer.text)


def test_json_that_a_model_writes_by_itself_is_not_changed_by_asking_for_json(engine: EngineHarness) -> None:
    """With other spacing than in its training, the bundled pair never finished its first string."""
    form = StructuredOutput.model_validate({"response_format": {"type": "json_object"}}).grammar
    assert form is not None
    for seed in range(3):
        plain = ask(f"plain-{seed}", "Describe the video as JSON.", [scene_video(seed)], max_tokens=250)
        found = engine.answer(plain)
        assert isinstance(json.loads(found.text), dict)
        assert engine.answer(replace(plain, request_id=f"json-{seed}", grammar=form.text)).ids == found.ids


@both_laws
def test_answers_with_and_without_a_grammar_do_not_disturb_each_other(
    engine: EngineHarness, law: SamplingParams
) -> None:
    kinds = ("schema", None, "regex", None, "choice", "schema", None, "schema")
    alone = [
        engine.answer(question(f"a{seed}", seed, kind, law, SpeculationMode.OFF)).ids for seed, kind in enumerate(kinds)
    ]
    for shift in range(2):
        together = engine.answers(
            [question(f"t{seed}", seed, kind, law, MODES[(seed + shift) % 4]) for seed, kind in enumerate(kinds)]
        )
        assert [answer.ids for answer in together] == alone


@pytest.fixture
def fragile() -> Iterator[EngineHarness]:
    harness = EngineHarness(PAIR)
    yield harness
    harness.close()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_killed_worker_changes_no_token(fragile: EngineHarness, role: str) -> None:
    kinds = ("schema", "schema", None, "schema")
    expected = [fragile.answer(question(f"u{seed}", seed, kind, LAWS[1])).ids for seed, kind in enumerate(kinds)]

    async def stream(request: GenerationRequest, begun: asyncio.Event) -> tuple[int, ...]:
        ids: tuple[int, ...] = ()
        async for event in fragile.engine.generate(request):
            if isinstance(event, TextDelta):
                ids += event.ids
                if len(ids) >= 8:
                    begun.set()
        return ids

    async def disturbed() -> list[tuple[int, ...]]:
        begun = [asyncio.Event() for _ in kinds]
        streams = [
            asyncio.ensure_future(stream(question(f"d{seed}", seed, kind, LAWS[1]), begun[seed]))
            for seed, kind in enumerate(kinds)
        ]
        for event in begun:
            await event.wait()
        pid = fragile.engine.worker_pids()[role]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*streams)

    assert fragile.run(disturbed(), timeout_s=110) == expected


def test_forced_tokens_are_proposed_and_come_true(engine: EngineHarness) -> None:
    """The pair was not trained on this JSON: forced tokens need no training."""
    objects = SCHEMA["properties"]["objects"] | {"minItems": 20, "maxItems": 20}  # enough for a late draft
    endless = LLMatcher.grammar_from_json_schema(
        SCHEMA | {"properties": {"objects": objects}}, defaults={"whitespace_flexible": False}
    )
    # The number depends on how soon the draft begins: on a busy machine a whole answer may be too early for it.
    asked = [question(f"forced-{number}", 1, "schema", mode=SpeculationMode.PARALLEL) for number in range(4)]
    told = [engine.answer(replace(each, grammar=endless)).finished.speculation for each in asked]
    assert sum(each.num_accepted_tokens for each in told) > sum(each.num_draft_tokens for each in told) / 2 > 0


def test_a_grammar_that_cannot_be_followed_fails_its_own_request_only(engine: EngineHarness) -> None:
    plain = engine.answer(ask("plain", "Describe the video.", [unsure_video(1)])).ids
    hopeless = replace(question("hopeless", 1, None), grammar="start: (")
    with pytest.raises(InvalidRequest, match="grammar"):
        engine.answer(hopeless)
    assert engine.answer(ask("after", "Describe the video.", [unsure_video(1)])).ids == plain
