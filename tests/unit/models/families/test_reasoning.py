"""Models that think: where an answer's reasoning begins, and what templates get of earlier reasoning."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from vidspec_models.families.conversation import conversation, reasoning_of, tokenised, tool_format
from vidspec_models.loading.checkpoint import load_processor
from vidspec_models.loading.spec import ModelSpec, model_path
from vidspec_models.request import ChatTemplate, Reasoning, ToolFormat, Turn

pytestmark = pytest.mark.unit

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SAYS = "{% for said in messages %}{{ said.role }}{% for part in said.content %}{{ part.text }}{% endfor %}{% endfor %}"
TOOLS = "{# tools, arguments, <tool_call></tool_call> #}"
OPENS = "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"
MAY_OPEN = "{% if enable_thinking %}<think>\n{% endif %}"
ASKS = [Turn(role="user", parts=("<think>",))]


@pytest.fixture
def processor() -> Any:
    found = load_processor(model_path(ModelSpec(path="bundled", role="draft")), None)
    found.tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return found


@pytest.mark.parametrize(
    ("template", "asked", "found"),
    [
        (SAYS + OPENS, ChatTemplate(), Reasoning.OPEN),
        (SAYS + OPENS, ChatTemplate(switches={"enable_thinking": False}), Reasoning.OPEN),
        (SAYS + OPENS + "assistant: ", ChatTemplate(switches={"enable_thinking": False}), Reasoning.TAGGED),
        (SAYS + MAY_OPEN + "\n", ChatTemplate(switches={"enable_thinking": True}), Reasoning.OPEN),
        (SAYS + "assistant: ", ChatTemplate(), Reasoning.TAGGED),
    ],
)
def test_reasoning_is_open_if_the_prompt_ends_with_its_beginning(
    processor: Any, template: str, asked: ChatTemplate, found: Reasoning
) -> None:
    """In the second case a user ended the prompt so, which a template of a released model does not allow."""
    processor.chat_template = template
    assert reasoning_of(processor, tokenised(processor, ASKS, [], asked).tolist()) is found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("<think>\nThe square", Reasoning.OPEN),
        ("<think>\nRed.\n</think>\n\nIt is", Reasoning.TAGGED),
        ("<think></think><think>No:", Reasoning.OPEN),
        ("It is", Reasoning.TAGGED),
    ],
)
def test_an_answer_that_continues_a_thought_begins_with_reasoning(processor: Any, said: str, found: Reasoning) -> None:
    processor.chat_template, template = SAYS + OPENS, ChatTemplate(continue_final_message=True)
    turns = [*ASKS, Turn(role="assistant", parts=(said,))]
    ids = tokenised(processor, turns, [], template).tolist()
    assert reasoning_of(processor, ids, continues=said) is found


def test_a_model_without_the_tokens_has_no_reasoning(processor: Any) -> None:
    plain = load_processor(model_path(ModelSpec(path="bundled", role="draft")), None)
    plain.chat_template = SAYS + OPENS
    assert reasoning_of(plain, tokenised(plain, ASKS, [], ChatTemplate()).tolist()) is Reasoning.NONE


def test_tags_that_no_text_shows_are_no_reasoning(processor: Any) -> None:
    plain = load_processor(model_path(ModelSpec(path="bundled", role="draft")), None)
    plain.tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS], special_tokens=True)
    plain.chat_template = SAYS + OPENS
    assert reasoning_of(plain, tokenised(plain, ASKS, [], ChatTemplate()).tolist()) is Reasoning.NONE


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (SAYS + OPENS + TOOLS, ToolFormat.HERMES),
        (SAYS + MAY_OPEN + TOOLS + "assistant: ", ToolFormat.OTHER),
        (SAYS + "{{ raise_exception('no') }}" + OPENS + TOOLS, ToolFormat.OTHER),
    ],
)
def test_a_model_may_call_tools_where_it_is_known_from_the_prompt_that_it_thinks(
    processor: Any, template: str, found: ToolFormat
) -> None:
    processor.chat_template = template
    assert tool_format(processor) is found


def test_a_template_gets_earlier_reasoning_without_placeholders_and_only_where_there_is_some(processor: Any) -> None:
    thought = f"I see {processor.video_token}."
    asked, said = conversation(
        processor, [Turn(role="user", parts=("?",)), Turn(role="assistant", parts=("Red.",), reasoning=thought)]
    )
    assert "reasoning_content" not in asked
    assert said["reasoning_content"] == "I see < video>."
