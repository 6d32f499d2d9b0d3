"""The text of an answer as it comes, taken apart: what the model thinks, then content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vidspec_models.request import END_THINK, THINK, Reasoning
from vidspec_service.api.schemas.tool_calls import CallFormat, Delta, ToolCallParser


class AnswerParser:
    """Turns one answer's text, as it comes, into deltas: `reasoning`, then those of ToolCallParser.

    Line breaks around reasoning are the template's, and dropped.
    """

    def __init__(self, calls: CallFormat | None, reasoning: Reasoning, *, shows_reasoning: bool = True) -> None:
        """`calls` says how tool calls are written; None: there are none."""
        self._answer = ToolCallParser(calls)
        self._shows_reasoning = shows_reasoning
        self._pending = ""  # text not read yet
        self._read = self._read_answer if reasoning is Reasoning.NONE else self._read_beginning
        self._read_untagged = self._read_reasoning if reasoning is Reasoning.OPEN else self._read_answer
        self._drops_breaks = False  # until the first other character of reasoning or of what follows it

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far is reasoning that has not ended."""
        return self._read == self._read_reasoning

    def push(self, text: str) -> list[Delta]:
        """Returns the deltas that are certain by now."""
        self._pending += text
        return self._read()

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        """Called when the text has ended: the deltas held back, and the finish reason, as of ToolCallParser."""
        if self._read == self._read_beginning:
            self._read = self._read_untagged
        held = self._thought(self._pending) if self.is_thinking else self._read()
        last, reason = self._answer.finish(reason)
        return held + last, reason

    def _read_beginning(self) -> list[Delta]:
        """Some models repeat the `<think>` that ends their prompt."""
        begins = self._pending.lstrip()
        if begins.startswith(THINK):
            self._pending, self._read = begins[len(THINK) :], self._read_reasoning
        elif THINK.startswith(begins):  # it may become the tag
            return []
        else:
            self._read = self._read_untagged
        self._drops_breaks = self.is_thinking
        return self._read()

    def _read_reasoning(self) -> list[Delta]:
        thought, tag, said = self._pending.partition(END_THINK)
        if not tag:  # what ends the text may be line breaks and the beginning of the tag
            sizes = range(len(END_THINK) - 1, 0, -1)
            held = next((size for size in sizes if thought.endswith(END_THINK[:size])), 0)
            said = thought[len(thought[: len(thought) - held].rstrip("\n")) :]
            thought = thought[: len(thought) - len(said)]
        self._pending = said
        deltas = self._thought(thought)
        if not tag:
            return deltas
        self._read, self._drops_breaks = self._read_answer, True
        return deltas + self._read()

    def _thought(self, text: str) -> list[Delta]:
        text = self._without_breaks(text.rstrip("\n"))
        return [{"reasoning": text}] if text and self._shows_reasoning else []

    def _read_answer(self) -> list[Delta]:
        text, self._pending = self._without_breaks(self._pending), ""
        return self._answer.push(text)

    def _without_breaks(self, text: str) -> str:
        text = text.lstrip("\n") if self._drops_breaks else text
        self._drops_breaks = self._drops_breaks and not text
        return text


def message_from(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The whole message: `content`; or `tool_calls`, with null as `content` if there is no text; maybe `reasoning`."""
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning", "")
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": "function", "function": {**piece["function"]}})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    said = {"content": content or None, "tool_calls": calls} if calls else {"content": content}
    return {**said, "reasoning": reasoning} if reasoning else said
