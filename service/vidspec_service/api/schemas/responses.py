"""/v1/responses: OpenAI's newer API for what /v1/chat/completions does. Nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from vidspec_models.request import Turn
from vidspec_service.api.grammars.grammar import Constraint
from vidspec_service.api.schemas.chat_messages import PlacedTurn, with_one_system
from vidspec_service.api.schemas.client_fields import ClientFields, Label, inert, neutral
from vidspec_service.api.schemas.conversation import Conversation
from vidspec_service.api.schemas.dialects import Dialect
from vidspec_service.api.schemas.fields import (
    MAX_TEXT,
    MAX_TURNS,
    Count,
    NonBlankText,
    Strict,
    StringOr,
    TopLogprobs,
    VideoSource,
)
from vidspec_service.api.schemas.responses_input import InputItem, InputMessage, turns_of
from vidspec_service.api.schemas.responses_output import ResponseDialect, ResponsesResponse
from vidspec_service.api.schemas.structured_output import JsonSchema
from vidspec_service.api.schemas.tool_use import (
    MAX_TOOLS,
    TOOL_CHOICE_DESCRIPTION,
    Function,
    ToolChoice,
    ToolChoiceObject,
    ToolMode,
    ToolName,
)

_STATELESS = "this server does not store answers; send the whole conversation as input"
_TOLD = {*ResponsesResponse.model_fields} - {"model"}  # the answer's own is the served model's name

Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_TURNS)]
Input = StringOr[NonBlankText, Items]


class FunctionType(Strict):
    """The kind of tool; functions are the only kind."""

    type: Literal["function"]


class ResponseTool(Function, FunctionType):
    """A function that the answer may or must call."""


class NamedToolChoice(ToolChoiceObject, FunctionType):
    """The function to call."""

    name: ToolName

    @property
    def chosen(self) -> tuple[ToolMode, list[str]]:
        return "required", [self.name]


class AllowedToolsChoice(ToolChoiceObject):
    """`auto` or `required`, with some of the tools; the prompt has all of them."""

    type: Literal["allowed_tools"]
    mode: ToolMode
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]

    @property
    def chosen(self) -> tuple[ToolMode, list[str]]:
        return self.mode, [tool.name for tool in self.tools]


ByName = Annotated[NamedToolChoice | AllowedToolsChoice, Field(discriminator="type")]
ToolChoiceField = StringOr[ToolChoice, ByName]


class PlainText(Strict):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class TextSchema(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextOptions(Strict):
    """What the text looks like."""

    format: Annotated[PlainText | TextSchema, Field(discriminator="type")] | None = Field(
        None, description="Text, any JSON object, or JSON that follows a schema."
    )
    verbosity: Label | None = inert("ask for a length in the prompt")


class StreamOptions(Strict):
    """Options of a stream."""

    include_obfuscation: bool | None = inert("events are not padded")


class ResponsesRequest(ClientFields, Conversation):
    """The JSON body."""

    newer_limit: ClassVar = "max_output_tokens"

    input: Input = Field(
        description="The question; or a conversation, which may have videos, images, tool calls and their results."
    )
    instructions: Annotated[str, StringConstraints(max_length=MAX_TEXT)] | None = Field(
        None, description="The system message; those of `input` follow it."
    )
    max_output_tokens: Count | None = Field(None, description="Maximum tokens of the answer.")
    text: TextOptions | None = Field(None, description="What the answer looks like.")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the answer may or must call; see `tool_choice`."
    )
    tool_choice: ToolChoiceField | None = Field(None, description=TOOL_CHOICE_DESCRIPTION)
    stream_options: StreamOptions | None = Field(None, description="Only relevant with `stream`.")
    reasoning: dict[Label, Any] | None = inert("models here have no levels of reasoning")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="Return each token's log probability; of encrypted reasoning there is none to return."
    )
    max_tool_calls: Count | None = inert("it limits calls of tools that OpenAI's server runs itself")
    truncation: Literal["disabled"] | None = neutral("disabled", "this server refuses input that is too long")
    context_management: None = neutral(None, "this server shortens no conversation")
    background: Literal[False] | None = neutral(False, _STATELESS)
    previous_response_id: None = neutral(None, _STATELESS)
    conversation: None = neutral(None, _STATELESS)
    prompt: None = neutral(None, _STATELESS)
    n: Literal[1] | None = neutral(1, "a response is one answer")
    logprobs: Literal[False] | None = neutral(False, "use include, as in OpenAI's API")
    top_logprobs: TopLogprobs | None = Field(
        None, description="Also return this many of the most likely tokens at each position; implies log probabilities."
    )

    @property
    def num_logprobs(self) -> int | None:
        is_asked = "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if is_asked or self.top_logprobs else None

    @property
    def tool_functions(self) -> list[ResponseTool]:
        return self.tools or []

    def text_constraints(self) -> list[Constraint]:
        found = super().text_constraints()
        form = None if self.text is None else self.text.format
        if isinstance(form, TextSchema):
            found.append(("text.format.schema", "json", form.schema_))
        elif form is not None and form.type == "json_object":
            found.append(("text.format", "json", {"type": "object"}))
        return found

    @property
    def sources(self) -> tuple[VideoSource, ...]:
        items = () if isinstance(self.input, str) else self.input
        return tuple(source for item in items if isinstance(item, InputMessage) for source in item.sources)

    @property
    def dialect(self) -> Dialect:
        """How to answer: the answer repeats fields of the request, as in OpenAI's API."""
        asked = self.model_dump(mode="json", by_alias=True, include=_TOLD, exclude_none=True)
        asked["text"] = {"format": {"type": "text"}, **asked.get("text", {})}
        return ResponseDialect(
            asked=asked, calls=self.tool_use.call_format, shows_reasoning=self.include_reasoning is not False
        )

    @property
    def placed_turns(self) -> list[PlacedTurn]:
        is_told = bool(self.instructions and self.instructions.strip())
        first = [("instructions", Turn(role="system", parts=(self.instructions,)))] if is_told else []
        if isinstance(self.input, str):
            return [*first, ("input", Turn(role="user", parts=(self.input,)))]
        return with_one_system([*first, *turns_of(self.input)])
