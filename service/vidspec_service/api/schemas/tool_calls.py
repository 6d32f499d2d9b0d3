"""Answers that may call tools: their text is parsed, while it is generated, into content and calls."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Delta = dict[str, Any]  # `reasoning`, `content`, or `tool_calls` with one piece of one call
OPENS, CLOSES = "<tool_call>", "</tool_call>"  # tokens of models that call tools as Hermes and Qwen do


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls are written: a head, the arguments as a JSON object, a tail."""

    heads: Mapping[str, str]  # what comes before the arguments -> the tool's name
    tail: str = ""
    opens: str | None = None  # what every head begins with; text may precede it. None: the whole text is one call


class ToolCallParser:
    """Turns one answer's text, as it comes, into deltas of a message, in OpenAI's shape.

    Text up to the first call is content; text between and after calls is dropped, as in vLLM.
    """

    def __init__(self, calls: CallFormat | None) -> None:
        """`calls` says how calls are written; None: all text is content."""
        self._format = calls or CallFormat(heads={})
        self._pending = ""  # text not read yet
        self._num_calls = 0
        self._read = self._read_content if calls is None or calls.opens else self._read_head
        self._arguments = _JsonObjectEnd()

    def push(self, text: str) -> list[Delta]:
        """Returns the deltas that are certain by now; the text of arguments is passed on as it comes."""
        if not text:  # a call that is the whole text begins with its arguments
            return []
        self._pending += text
        deltas: list[Delta] = []
        before = None
        while before != (before := (self._read, len(self._pending))):
            deltas += self._read()
        return deltas

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        """Called when the text has ended: returns the deltas held back, and the finish reason in OpenAI's words.

        A call cut off before its name is known is content; one cut off in its arguments is not to be called, so that
        the reason stays.
        """
        rest, self._pending = self._pending, ""
        if not self._num_calls:
            return self._content(rest), reason
        is_cut = self._read == self._read_arguments
        return [], "tool_calls" if reason == "stop" and not is_cut else reason

    def _content(self, text: str) -> list[Delta]:
        return [{"content": text}] if text and not self._num_calls else []

    def _read_content(self) -> list[Delta]:
        opens = self._format.opens or ""
        at = self._pending.find(opens) if opens else -1
        if at >= 0:
            self._read = self._read_head
        else:  # the end of the text may be the beginning of a call
            held = (size for size in range(len(opens) - 1, 0, -1) if self._pending.endswith(opens[:size]))
            at = len(self._pending) - next(held, 0)
        said, self._pending = self._pending[:at], self._pending[at:]
        return self._content(said)

    def _read_head(self) -> list[Delta]:
        for head, name in self._format.heads.items():
            if self._pending.startswith(head):
                self._pending = self._pending[len(head) :]
                self._read = self._read_arguments
                self._num_calls += 1
                called = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
                return [self._piece("", name=name, **called)]
        return []

    def _read_arguments(self) -> list[Delta]:
        end = self._arguments.find(self._pending)
        if end is not None:
            self._read = self._read_tail
        said, self._pending = self._pending[:end], "" if end is None else self._pending[end:]
        return [self._piece(said)] if said else []

    def _read_tail(self) -> list[Delta]:
        if self._pending.startswith(self._format.tail) and self._format.opens is not None:
            self._pending = self._pending[len(self._format.tail) :]
            self._read = self._read_content
        return []

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
