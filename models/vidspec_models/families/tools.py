"""Tools in a conversation, as the chat templates of released models read them; and which of these read them at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from vidspec_models.request import ToolFormat, Turn

Plain = Callable[[str], str]  # a text without what would stand for a video


def tool_format(template: object, vocabulary: Collection[str]) -> ToolFormat:
    """What a chat template, as its Jinja text, makes of tools; `vocabulary` are the model's tokens.

    Templates do not say how their models call one. Those of Hermes' kind have their calls between two tokens,
    `<tool_call>` and `</tool_call>`, as a JSON object with a name and `arguments`; Qwen's coders write
    `<function=...>` between the same. One that thinks first does so between tokens that no grammar for text allows.
    """
    if not isinstance(template, str) or "tools" not in template:
        return ToolFormat.NONE
    has_tags = all(tag in template and tag in vocabulary for tag in ("<tool_call>", "</tool_call>"))
    is_hermes = has_tags and "arguments" in template and not any(tag in template for tag in ("<function=", "<think>"))
    return ToolFormat.HERMES if is_hermes else ToolFormat.OTHER


def as_messages_have_them(turn: Turn, plain: Plain) -> dict[str, Any]:
    """What a turn that is about tools has besides role and content: calls, arguments as objects, or whose result."""
    fields: dict[str, Any] = {}
    if turn.tool_calls:
        fields["tool_calls"] = [
            {
                "type": "function",
                "id": call.call_id,
                "function": {"name": call.name, "arguments": as_templates_read_it(call.arguments, plain)},
            }
            for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        fields["tool_call_id"] = turn.tool_call_id
    return fields


def as_templates_read_it(text: str, plain: Plain) -> Any:
    """What the JSON text of a tool or of a call's arguments says, made plain where no escape hides anything."""
    return json.loads(plain(json.dumps(json.loads(text), ensure_ascii=False)))
