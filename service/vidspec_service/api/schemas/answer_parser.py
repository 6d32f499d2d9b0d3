"""The text of an answer as it comes, taken apart: what the model thinks, what it says, and the tools that it calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vidspec_models.request import END_THINK, THINK, Reasoning

Delta = dict[str, Any]  # `reasoning`, `content`, or `tool_calls` with one piece of one call
OPENS, CLOSES = "<tool_call>", "</tool_call>"  # tokens of models that call tools as Hermes and Qwen do


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls are written: a head, the arguments as a JSON object, a tail."""

    heads: Mapping[str, str]  # what comes before the arguments -> the tool's name
    tail: str = ""
    opens: str | None = None  # what every head begins with; text may precede it. None: the whole text is one call


class AnswerParser:
    """Turns one answer's text, as it comes, into deltas of a message, in OpenAI's shape.

    Line breaks around reasoning are the template's, and dropped. Text up to the first call is content; text between and
    after calls is dropped, as in vLLM.
    """

    def __init__(self, calls: CallFormat | None, reasoning: Reasoning, *, shows_reasoning: bool = True) -> None:
        """`calls` says how tool calls are written; None: there are none."""
        self.is_thinking = reasoning is Reasoning.OPEN  # whether the text ends within reasoning
        self._shows_reasoning = shows_reasoning
        self._num_calls = 0
        self.is_calling = False  # whether the text ends within the arguments of a call
        self._text = ""  # not read yet
        self._deltas = self._read(calls, reasoning)

    def push(self, text: str) -> list[Delta]:
        """Returns the deltas that are certain by now; the text of arguments is passed on as it comes."""
        self._text += text
        return list(iter(self._deltas.__next__, None))

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        """Called when the text has ended: returns the deltas held back, and the finish reason in OpenAI's words.

        A call cut off before its name is known is content; one cut off in its arguments is not to be called, so that
        the reason stays.
        """
        held = self._thought(self._text.rstrip("\n")) if self.is_thinking else self._said(self._text)
        is_to_call = self._num_calls > 0 and not self.is_calling
        return held, "tool_calls" if reason == "stop" and is_to_call else reason

    # Readers take the text from its front. They yield what they find, and None wherever more text is needed.

    def _read(self, calls: CallFormat | None, reasoning: Reasoning) -> Iterator[Delta | None]:
        if reasoning is not Reasoning.NONE:
            yield from self._read_reasoning()
        while calls is None:
            yield from self._said(self._text)
            self._text = ""
            yield None
        heads = tuple(calls.heads)
        while calls.opens is not None:
            yield from self._read_up_to(calls.opens, self._said)
            while not self._text.startswith(heads) and any(head.startswith(self._text) for head in heads):
                yield None
            if self._text.startswith(heads):
                yield from self._read_call(calls)
            else:  # ordinary tokens can spell the tag in text
                yield from self._said(calls.opens)
                self._text = self._text.removeprefix(calls.opens)
        yield from self._read_call(calls)

    def _read_reasoning(self) -> Iterator[Delta | None]:
        while (begins := self._text.lstrip()) != THINK and THINK.startswith(begins):  # it may become the tag
            yield None
        if begins.startswith(THINK):  # some models repeat the `<think>` that ends their prompt
            self._text = begins.removeprefix(THINK)
            self.is_thinking = True
        if self.is_thinking:
            yield from self._skip_line_breaks()
            yield from self._read_up_to(END_THINK, self._thought, trailing="\n")
            self._text = self._text.lstrip("\n").removeprefix(END_THINK)
            self.is_thinking = False
            yield from self._skip_line_breaks()

    def _skip_line_breaks(self) -> Iterator[None]:
        self._text = self._text.lstrip("\n")
        while not self._text:
            yield None
            self._text = self._text.lstrip("\n")

    def _read_up_to(self, tag: str, told: Callable[[str], list[Delta]], trailing: str = "") -> Iterator[Delta | None]:
        """What comes before the tag and any `trailing` characters; what may be their beginning is held back."""
        found = ""
        while not found:
            text, found, _ = self._text.partition(tag)
            if not found:
                sizes = range(len(tag) - 1, 0, -1)
                text = text[: len(text) - next((size for size in sizes if text.endswith(tag[:size])), 0)]
            text = text.rstrip(trailing)
            self._text = self._text.removeprefix(text)
            yield from told(text)
            if not found:
                yield None

    def _read_call(self, calls: CallFormat) -> Iterator[Delta | None]:
        while not self._text or (head := next(filter(self._text.startswith, calls.heads), None)) is None:
            yield None
        self._text = self._text.removeprefix(head)
        self._num_calls += 1
        called = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        yield self._piece("", name=calls.heads[head], **called)
        self.is_calling = True
        arguments = _JsonObjectEnd()
        while self.is_calling:
            end = arguments.find(self._text)
            said, self._text = self._text[:end], "" if end is None else self._text[end:]
            self.is_calling = end is None
            if said:
                yield self._piece(said)
            if self.is_calling:
                yield None
        while not self._text.startswith(calls.tail):
            yield None
        self._text = self._text.removeprefix(calls.tail)

    def _thought(self, text: str) -> list[Delta]:
        return [{"reasoning": text}] if text and self._shows_reasoning else []

    def _said(self, text: str) -> list[Delta]:
        return [{"content": text}] if text and not self._num_calls else []

    def _piece(self, arguments: str, *, name: str | None = None, **called: str) -> Delta:
        function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
        return {"tool_calls": [{"index": self._num_calls - 1, **called, "function": function}]}


class _JsonObjectEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = self._is_escaped = False

    def find(self, piece: str) -> int | None:
        """The index after the object's last brace; None if that brace is not in this piece."""
        for at, char in enumerate(piece):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = char == "\\"
                self._is_string = char != '"'
            elif char == '"':
                self._is_string = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if self._depth == 0:
                    return at + 1
        return None


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
