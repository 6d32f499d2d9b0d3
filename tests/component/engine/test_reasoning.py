"""A model that thinks first, on real workers: every mode thinks the same, and a grammar begins after that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.component.engine.harness import EngineHarness, ask, scene_video
from vidspec_models.loading.spec import ModelSpec, model_path
from vidspec_models.request import END_THINK, THINK, GenerationRequest, Reasoning, SamplingParams, SpeculationMode
from vidspec_service.api.schemas.answer_parser import AnswerParser, message_from
from vidspec_service.engine.config import EngineConfig, WorkerConfig

pytestmark = [pytest.mark.component, pytest.mark.slow, pytest.mark.timeout(240)]

OPENS = "{% if add_generation_prompt and enable_thinking is not false %}{{ '<think>\\n' }}{% endif %}"
SCENE: dict[str, Any] = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "word": {"type": "string", "maxLength": 9}},
    "required": ["shape", "word"],
    "additionalProperties": False,
}


def half(role: str, folder: Path) -> WorkerConfig:
    """One model of the bundled pair with two more tokens; its embedding has spare rows for them."""
    shutil.copytree(model_path(ModelSpec(path="bundled", role=role)), folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (THINK, END_THINK)])
    tokenizer.chat_template += OPENS
    tokenizer.save_pretrained(folder)
    return WorkerConfig(model=str(folder), dtype="float32")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHarness]:
    folder = tmp_path_factory.mktemp("pair")
    config = EngineConfig(target=half("target", folder / "target"), draft=half("draft", folder / "draft"))
    harness = EngineHarness(config)
    yield harness
    harness.close()


def asked(engine: EngineHarness, name: str, law: SamplingParams, *, ends: float) -> GenerationRequest:
    """A caption; a bias makes the model end its reasoning, which it was not trained to do."""
    end = engine.engine.tokenizer.token_to_id(END_THINK)
    assert end is not None
    request = ask(name, "Describe the video.", [scene_video(3, 2)], max_tokens=150)
    return replace(request, sampling=replace(law, logit_bias=((end, ends),)))


@pytest.mark.parametrize("law", [SamplingParams(), SamplingParams(temperature=0.8, seed=7)], ids=["greedy", "T=0.8"])
def test_every_mode_thinks_and_answers_alike_and_a_grammar_begins_after_the_reasoning(
    engine: EngineHarness, law: SamplingParams
) -> None:
    grammar = LLMatcher.grammar_from_json_schema(SCENE, defaults={"whitespace_flexible": False})
    found = []
    for mode in SpeculationMode:
        request = asked(engine, f"json-{mode}-{law.seed}", law, ends=13.0)
        found.append(engine.answer(replace(request, grammar=grammar, speculation=mode)))
    assert len({answer.ids for answer in found}) == 1, found
    parser = AnswerParser(None, Reasoning.OPEN)
    message = message_from([*parser.push(found[0].text), *parser.finish("stop")[0]])
    assert set(json.loads(message["content"])) == {"shape", "word"}
    assert len(message["reasoning"]) > 5, "the bias does not end it at once"
    assert {answer.finished.reasoning_tokens for answer in found} == {
        found[0].ids.index(request.sampling.logit_bias[0][0]) + 1
    }


def test_a_request_may_switch_thinking_off(engine: EngineHarness) -> None:
    request = asked(engine, "off", SamplingParams(), ends=-100.0)
    assert request.template is not None
    thought = engine.answer(request)
    plain = engine.answer(
        replace(request, request_id="on", template=replace(request.template, switches={"enable_thinking": False}))
    )
    assert thought.finished.reasoning_tokens == len(thought.ids)
    assert plain.finished.reasoning_tokens == 0
