"""Tools in a prompt: which templates read them, and what a template receives."""

from __future__ import annotations

import json
from bisect import bisect_left
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from vidspec_models.errors import ConversationRefused
from vidspec_models.families.conversation import conversation, tokenised, tool_format
from vidspec_models.loading.checkpoint import load_processor
from vidspec_models.loading.spec import ModelSpec, model_path
from vidspec_models.request import ChatTemplate, ToolCall, ToolFormat, Turn

pytestmark = pytest.mark.unit

TAGS = {"<tool_call>": 1, "</tool_call>": 2}
# A shortened version of Qwen's template.
HERMES = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}<{{ message.role }}>
{%- for part in message.content %}{{ part.text }}{% endfor %}
{%- for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- if message.role == 'tool' %}({{ message.tool_call_id }}){% endif %}{% endfor %}"""


class _Knows:
    """A processor with this template and these tokens."""

    def __init__(self, template: Any, known: dict[str, int]) -> None:
        self.chat_template = template
        self.tokenizer = SimpleNamespace(get_vocab=lambda: known)


@pytest.mark.parametrize(
    ("template", "known", "found"),
    [
        (None, TAGS, ToolFormat.NONE),
        ("{% for message in messages %}{{ message }}{% endfor %}", TAGS, ToolFormat.NONE),
        (HERMES, TAGS, ToolFormat.HERMES),
        (HERMES, {}, ToolFormat.OTHER),
        ("{{ tools }}<tool_call><function=a></tool_call>arguments", TAGS, ToolFormat.OTHER),
        ("{{ tools }}<tool_call>name<arg_key></tool_call>", TAGS, ToolFormat.OTHER),
        ("{{ tools }}[TOOL_CALLS] arguments", TAGS, ToolFormat.OTHER),
    ],
)
def test_a_template_shows_how_its_model_calls_tools(template: Any, known: Any, found: ToolFormat) -> None:
    assert tool_format(_Knows(template, known)) is found


@pytest.fixture(scope="module")
def processor() -> Any:
    found = load_processor(model_path(ModelSpec(path="bundled", role="draft")), None)
    assert tool_format(found) is ToolFormat.NONE
    found.chat_template = HERMES
    return found


def test_the_template_is_given_tools_calls_and_results(processor: Any) -> None:
    called = ToolCall(call_id="call_1", name="go", arguments='{"to": "caf\\u00e9"}')
    turns = [
        Turn(role="user", parts=("Go.",)),
        Turn(role="assistant", parts=(), tool_calls=(called,)),
        Turn(role="tool", parts=("Arrived.",), tool_call_id="call_1"),
    ]
    tool = {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}
    ids = tokenised(processor, turns, [], ChatTemplate(tools=(json.dumps(tool),)))
    text = processor.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == (
        f"<tools>{json.dumps(tool)}</tools><user>Go.<assistant><tool_call>\n"
        '{"name": "go", "arguments": {"to": "café"}}\n</tool_call><tool>Arrived.(call_1)'
    )


def test_a_template_is_told_nothing_of_tools_in_a_turn_without_them(processor: Any) -> None:
    """Some ask whether a message has the field, not what is in it."""
    (message,) = conversation(processor, [Turn(role="user", parts=("Go.",))])
    assert message.keys() == {"role", "content"}


def test_a_template_that_asks_for_tools_is_told_that_there_are_none(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ask whether there is a list, not what is in it."""
    monkeypatch.setattr(processor, "chat_template", "{{ tools is none }}")
    ids = tokenised(processor, [Turn(role="user", parts=("Go.",))], [], ChatTemplate())
    assert processor.tokenizer.decode(ids) == "True"


def test_half_a_surrogate_pair_in_the_arguments_of_a_call_is_told_as_an_unknown_character(processor: Any) -> None:
    called = ToolCall(call_id="call_1", name="go", arguments='{"to": "\\ud83d", "by": "\\ud83d\\ude80"}')
    turns = [Turn(role="assistant", parts=(), tool_calls=(called,))]
    text = processor.tokenizer.decode(tokenised(processor, turns, [], ChatTemplate()), skip_special_tokens=False)
    assert '{"to": "\ufffd", "by": "\U0001f680"}' in text


def _nested(depth: int) -> str:
    return '{"to":' * depth + "1" + "}" * depth


def _is_parsed(depth: int) -> bool:
    try:
        json.loads(_nested(depth))
    except RecursionError:
        return False
    return True


def _text_with(processor: Any, arguments: str) -> str:
    called = ToolCall(call_id="call_1", name="go", arguments=arguments)
    turns = [Turn(role="assistant", parts=(), tool_calls=(called,))]
    text: str = processor.tokenizer.decode(tokenised(processor, turns, [], ChatTemplate()))
    return text


def test_arguments_nested_too_deeply_are_refused_and_others_rendered_whole(processor: Any) -> None:
    """Python parses 1,000 or 10,000 levels, by its version; what it just parses, a template may have no room for."""
    most = bisect_left(range(1_000_000), True, key=lambda depth: not _is_parsed(depth))
    with pytest.raises(ConversationRefused, match="nested too deeply"):
        _text_with(processor, _nested(most * 3 // 2))
    with suppress(ConversationRefused):
        assert _text_with(processor, _nested(most * 9 // 10)).count('{"to"') == most * 9 // 10
    assert _text_with(processor, _nested(100)).count('{"to"') == 100


def test_no_words_about_tools_stand_for_a_video(processor: Any) -> None:
    hidden = '{"to": "a \\u003cvideo> <image>"}'
    called = ToolCall(call_id="call_1", name="go", arguments=hidden)
    messages = conversation(processor, [Turn(role="assistant", parts=(), tool_calls=(called,))])
    ids = tokenised(processor, [Turn(role="user", parts=("Go.",))], [], ChatTemplate(tools=(hidden,)))
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {"to": "a < video> < image>"}
    assert not {processor.tokenizer.convert_tokens_to_ids(name) for name in ("<video>", "<image>")} & {*ids.tolist()}
    without = tokenised(processor, [Turn(role="user", parts=("Go.",))], [], ChatTemplate())
    assert "<tools>" not in processor.tokenizer.decode(without, skip_special_tokens=False)
