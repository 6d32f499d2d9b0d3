"""The turns of a conversation in the OpenAI dialect: roles, parts, calls of tools and their results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag

from vidspec_models.request import VIDEO, ToolCall, Turn
from vidspec_service.api.schemas.chat_parts import SaidPart, TextPart, VideoPart
from vidspec_service.api.schemas.client_fields import TurnFields
from vidspec_service.api.schemas.fields import MAX_TEXT, Said, Strict, check_said, check_turns
from vidspec_service.api.schemas.tool_use import MAX_TOOLS, ToolName
from vidspec_service.errors import InvalidRequest

MAX_PARTS = 64

Part = Annotated[TextPart | VideoPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS)]
Content = Annotated[
    Annotated[Said, Tag("a string")] | Annotated[Parts, Tag("a list")],
    Discriminator(lambda value: "a list" if isinstance(value, list) else "a string"),
]
CallId = Annotated[str, StringConstraints(pattern=r"^[\w.:|-]{1,128}$")]


def _json_object(text: str) -> str:
    """The text, if it is a JSON object; raises ValueError."""
    try:
        is_object = isinstance(json.loads(text), dict)
    except RecursionError:
        is_object = False
    if not is_object:
        raise ValueError("it must be a JSON object, as text")
    return text


Arguments = Annotated[str, StringConstraints(max_length=MAX_TEXT), AfterValidator(_json_object)]


class CalledFunction(Strict):
    """What was called."""

    name: ToolName
    arguments: Arguments = Field(description="A JSON object, as text.")


class CalledTool(Strict):
    """A call that an answer made."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Taken; some clients send back what a stream had.")


class ChatTurn(TurnFields):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="`developer` is `system`.")
    content: Content | None = Field(
        None, description="Text, or parts; a user turn may have videos and images among them."
    )
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Of an assistant's turn: what it called."
    )
    tool_call_id: CallId | None = Field(None, description="Of a tool's turn: the call whose result it is.")

    @property
    def videos(self) -> list[VideoPart]:
        """The videos of this turn."""
        return [part for part in self.content or () if not isinstance(part, str | SaidPart)]

    @property
    def turn(self) -> Turn:
        """For the engine."""
        return Turn(
            role="system" if self.role == "developer" else self.role,
            parts=parts_of(self.content or []),
            tool_calls=tuple(
                ToolCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
        )


def parts_of(content: str | Sequence[Strict]) -> tuple[str | None, ...]:
    """As in Turn; text parts beside each other are joined by line breaks, and what says nothing is no part."""
    if isinstance(content, str):
        return (content,) if content else ()
    parts: list[str | None] = []
    for is_said, group in groupby(content, lambda part: isinstance(part, SaidPart)):
        alike = list(group)
        said = "\n".join(part.text for part in alike if isinstance(part, SaidPart) and part.text)
        parts += ([said] if said else []) if is_said else [VIDEO] * len(alike)
    return tuple(parts)


def check_conversation(turns: Sequence[Turn], places: Sequence[str], *, is_continued: bool = False) -> None:
    """Who speaks when makes sense, and whoever asks says something; raises InvalidRequest.

    `places` are where the turns are in the body: `messages.0`.
    """
    lasts = ("assistant",) if is_continued else ("user", "tool")
    check_turns([(turn.role, _length(turn)) for turn in turns], *lasts, places=places)
    for turn, place in zip(turns, places, strict=True):
        if turn.num_videos and turn.role != "user":
            raise InvalidRequest("Videos and images must be in user turns.", param=f"{place}.role")
        if (turn.role == "tool") != (turn.tool_call_id is not None):
            raise InvalidRequest("A tool's message has a tool_call_id, and no other has.", param=f"{place}.role")
        if turn.tool_calls and turn.role != "assistant":
            raise InvalidRequest("Only the assistant calls tools.", param=f"{place}.tool_calls")
        if not turn.num_videos:
            check_said(turn.role, turn.text, place)
    if turns[-1].role != "tool" and not turns[-1].text.strip():
        raise InvalidRequest("The last message must say something.", param=places[-1])


def _length(turn: Turn) -> int:
    return len(turn.text) + sum(len(call.arguments) for call in turn.tool_calls)
