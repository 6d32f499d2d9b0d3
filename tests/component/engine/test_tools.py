"""Tools on real workers: a pair with the template and tokens of models that call tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.component.engine.harness import EngineHarness, ask, scene_video
from vidspec_models.loading.spec import ModelSpec, model_path
from vidspec_models.request import DEFAULT_TEMPLATE, Reasoning, SamplingParams, SpeculationMode, ToolFormat
from vidspec_service.api.schemas.answer_parser import AnswerParser, message_from
from vidspec_service.api.schemas.chat_completions import ChatCompletionRequest
from vidspec_service.engine.config import EngineConfig, WorkerConfig

pytestmark = [pytest.mark.component, pytest.mark.slow, pytest.mark.timeout(240)]

TAGS = ["<tool_call>", "</tool_call>"]
TOLD = (
    "{% if tools %}{{ '<|im_start|>system \\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endif %}"
)
SHOWN = "{# <tool_call>, name and arguments, </tool_call> #}"
SCENE: dict[str, Any] = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "word": {"type": "string", "maxLength": 9}},
    "required": ["shape", "word"],
}
TOOLS = [
    {"type": "function", "function": {"name": "describe", "parameters": SCENE}},
    {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}},
]


def half(role: str, folder: Path) -> WorkerConfig:
    """One model of the bundled pair with two more tokens; its embedding has spare rows for them."""
    shutil.copytree(model_path(ModelSpec(path="bundled", role=role)), folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.chat_template = TOLD + SHOWN + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return WorkerConfig(model=str(folder), dtype="float32")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHarness]:
    folder = tmp_path_factory.mktemp("pair")
    harness = EngineHarness(
        EngineConfig(target=half("target", folder / "target"), draft=half("draft", folder / "draft"))
    )
    yield harness
    harness.close()


@pytest.mark.parametrize("law", [SamplingParams(), SamplingParams(temperature=0.8, seed=7)], ids=["greedy", "T=0.8"])
@pytest.mark.parametrize(("choice", "calls"), [("auto", True), ("auto", False), ("required", True)])
def test_every_mode_makes_the_same_calls_by_their_schemas(
    engine: EngineHarness, law: SamplingParams, choice: str, calls: bool
) -> None:
    """A bias makes the model begin a call, which it was not trained to do."""
    assert engine.engine.info.tool_format is ToolFormat.HERMES
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": choice}
    asked = ChatCompletionRequest.model_validate_json(json.dumps({**body, "parallel_tool_calls": False}), strict=True)
    asked = asked.for_engine(engine.engine.info)
    assert asked.grammar is not None
    begin = engine.engine.tokenizer.token_to_id(TAGS[0])
    assert begin is not None
    bias = ((begin, 100.0),) if calls and choice == "auto" else ()
    found = []
    for mode in SpeculationMode:
        request = ask(f"{choice}-{calls}-{mode}", "Describe the video.", [scene_video(3, 2)], max_tokens=250)
        template = replace(DEFAULT_TEMPLATE, tools=asked.tool_use.described)
        sampling = replace(law, logit_bias=bias)
        request = replace(request, template=template, grammar=asked.grammar.text, sampling=sampling, speculation=mode)
        found.append(engine.answer(request))
    assert len({answer.ids for answer in found}) == 1, found
    parser = AnswerParser(asked.tool_use.call_format, Reasoning.NONE)
    message = message_from([*parser.push(found[0].text), *parser.finish("stop")[0]])
    if not calls:
        assert message == {"content": found[0].text}
        assert "<" not in found[0].text
        return
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == ({"shape", "word"} if call["function"]["name"] == "describe" else set())
