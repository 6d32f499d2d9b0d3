"""The input of /v1/responses: a list of messages, tool calls and tool results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from vidspec_models.request import ToolCall, Turn
from vidspec_service.api.schemas.chat_messages import (
    MAX_PARTS,
    Arguments,
    BaseTextPart,
    CallId,
    FileRef,
    InputVideoPart,
    PlacedTurn,
    VideoUrlPart,
    by_url,
    parts_of,
)
from vidspec_service.api.schemas.client_fields import Label, PartFields, inert
from vidspec_service.api.schemas.fields import (
    Id,
    MessageText,
    Strict,
    StringOr,
    Url,
    VideoSource,
    exactly_one_of,
)
from vidspec_service.api.schemas.tool_use import ToolName

_INERT = "Accepted, so that an answer's items can be sent back; has no effect."

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(BaseTextPart):
    """Text; in answers its type is `output_text`."""

    type: Literal["input_text", "output_text"]
    annotations: list[Any] | None = Field(None, max_length=0, description="Only an empty list is accepted.")
    logprobs: list[Any] | None = Field(None, description=_INERT)


class InputImage(PartFields):
    """An image: PNG, JPEG or WebP."""

    type: Literal["input_image"]
    image_url: str = Field(min_length=1, description="`data:image/...;base64,...`, or https if the host is allowed.")
    file_id: None = Field(None, description="Only null is accepted.")
    detail: Label | None = inert("there is one image size")

    @property
    def source(self) -> VideoSource:
        """Where the image is."""
        return replace(by_url(self.image_url), is_still=True)


class InputFile(FileRef, PartFields):
    """A video, or an image in `file_data`."""

    type: Literal["input_file"]
    file_url: Url | None = Field(None, description="https address of a video, if the operator allows its host.")
    detail: Label | None = inert()

    _one_of_them = exactly_one_of("file_id", "file_data", "file_url")  # replaces FileRef's validator

    @property
    def source(self) -> VideoSource:
        """Where the video is."""
        return super().source if self.file_url is None else VideoSource(url=self.file_url)


InputPart = Annotated[
    InputText | InputImage | InputFile | VideoUrlPart | InputVideoPart,
    Field(discriminator="type"),
]
InputParts = Annotated[list[InputPart], Field(min_length=1, max_length=MAX_PARTS)]
Content = StringOr[MessageText, InputParts]


class InputMessage(Strict):
    """A message."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="`developer` means the same as `system`."
    )
    content: Content = Field(description="Text, or a list of parts; in a user message, parts may be videos and images.")
    id: Id | None = Field(None, description=_INERT)
    status: Status | None = Field(None, description=_INERT)
    phase: Label | None = Field(None, description=_INERT)

    @property
    def sources(self) -> tuple[VideoSource, ...]:
        """Where its videos and images are."""
        return tuple(part.source for part in self.content if not isinstance(part, str | BaseTextPart))

    @property
    def turn(self) -> Turn:
        """The message as a turn for the engine."""
        return Turn(role="system" if self.role == "developer" else self.role, parts=parts_of(self.content))


class CallFields(Strict):
    """What a function call and its result have in common."""

    call_id: CallId
    id: Id | None = Field(None, description=_INERT)
    status: Status | None = Field(None, description=_INERT)
    # Fields of OpenAI's own tools, which its client writes as null
    caller: None = Field(None, description="Only null is accepted.")
    namespace: None = Field(None, description="Only null is accepted.")


class FunctionCall(CallFields):
    """A function call from an earlier answer."""

    type: Literal["function_call"]
    name: ToolName
    arguments: Arguments = Field(description="A JSON object, as text.")
    async_: None = Field(None, alias="async", description="Only null is accepted.")

    @property
    def turn(self) -> Turn:
        """The call as a turn for the engine."""
        call = ToolCall(call_id=self.call_id, name=self.name, arguments=self.arguments)
        return Turn(role="assistant", parts=(), tool_calls=(call,))


class FunctionCallOutput(CallFields):
    """The result of a function call."""

    type: Literal["function_call_output"]
    output: Content = Field(description="Text, or a list of parts, which must be text.")
    name: Label | None = inert("the call has it")

    @property
    def turn(self) -> Turn:
        """The result as a turn for the engine."""
        return Turn(role="tool", parts=parts_of(self.output), tool_call_id=self.call_id)


class ReasoningText(Strict):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: MessageText


class ReasoningItem(Strict):
    """What the model thought before an earlier answer; templates leave out most of it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    summary: list[Any] | None = Field(None, max_length=MAX_PARTS, description=_INERT)
    encrypted_content: MessageText | None = Field(None, description=_INERT)
    id: Id | None = Field(None, description=_INERT)
    status: Status | None = Field(None, description=_INERT)

    @property
    def turn(self) -> Turn:
        """The beginning of the assistant's turn."""
        return Turn(role="assistant", parts=(), reasoning="\n".join(part.text for part in self.content or ()))


def _kind(item: object) -> object:
    """The item's `type`; anything without one is validated, or refused, as a message."""
    return (item.get("type") if isinstance(item, dict) else None) or "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def turns_of(items: Sequence[InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem]) -> list[PlacedTurn]:
    """The turns, each with its first place in the body.

    What an assistant thought, its message and the calls after that are one turn.
    """
    found: list[PlacedTurn] = []
    for index, item in enumerate(items):
        turn = item.turn
        before = found[-1][1] if found and found[-1][1].role == turn.role == "assistant" else None
        if before is not None and (turn.tool_calls or not (before.parts or before.tool_calls)):
            place, _ = found.pop()
            calls = (*before.tool_calls, *turn.tool_calls)
            thoughts = "\n".join(filter(None, (before.reasoning, turn.reasoning)))
            said = before.parts or turn.parts
            found.append((place, replace(before, parts=said, tool_calls=calls, reasoning=thoughts)))
        else:
            found.append((f"input.{index}", turn))
    return found
