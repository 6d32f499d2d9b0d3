"""Generated text as what an assistant says: deltas of a message, in OpenAI's shape. `tool_calls` has another kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

Delta = dict[str, Any]  # `content`, or `tool_calls` with one piece of one call


class Speech(ABC):
    """What one answer's text is told as, while it comes."""

    @abstractmethod
    def push(self, text: str) -> list[Delta]:
        """What is certain by now."""

    @abstractmethod
    def finish(self, reason: str) -> tuple[list[Delta], str]:
        """What was held back, once no more comes, and why it ended, in OpenAI's words."""


SpeechFactory = Callable[[], Speech]


class PlainSpeech(Speech):
    """Text is content."""

    def push(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        return [], reason


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The whole message: `content`; or `tool_calls`, beside which nothing said is null."""
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": "function", "function": {**piece["function"]}})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}
