"""OpenAI's /v1/chat/completions: its requests, with the limits of our own route, and its answers field for field.

Fields that are accepted and change nothing are listed in `client_fields`; no other field is ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from typing_extensions import TypedDict

from vidspec_models.request import ChatTemplate
from vidspec_service.api.schemas.answer_parser import Delta
from vidspec_service.api.schemas.chat_messages import ChatMessage, PlacedTurn, placed_turns_of
from vidspec_service.api.schemas.chat_request import ChatRequest
from vidspec_service.api.schemas.client_fields import ClientFields, Label, Markable, TemplateFields, inert, neutral
from vidspec_service.api.schemas.conversation import Conversation
from vidspec_service.api.schemas.dialects import AnswerMessage, ChatDialect, Dialect, ResponseBody, Usage
from vidspec_service.api.schemas.extras import ChoiceLogprobs
from vidspec_service.api.schemas.fields import MAX_TURNS, Count, Strict, StringOr, VideoSource, is_none
from vidspec_service.api.schemas.tool_use import (
    MAX_TOOLS,
    TOOL_CHOICE_DESCRIPTION,
    Function,
    ToolChoice,
    ToolChoiceObject,
    ToolMode,
    ToolName,
)
from vidspec_service.errors import InvalidRequest


class Tool(Markable):
    """A function, as OpenAI's clients wrap it."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """One of `tools`."""

    name: ToolName


class NamedToolChoice(ToolChoiceObject):
    """The tool to call."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def chosen(self) -> tuple[ToolMode, list[str]]:
        return "required", [self.function.name]


class AllowedTools(Strict):
    """Some of `tools`."""

    mode: ToolMode
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(ToolChoiceObject):
    """`auto` or `required`, with some of the tools; the prompt has all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def chosen(self) -> tuple[ToolMode, list[str]]:
        return self.allowed_tools.mode, [tool.function.name for tool in self.allowed_tools.tools]


ByName = Annotated[NamedToolChoice | AllowedToolsChoice, Field(discriminator="type")]
ToolChoiceField = StringOr[ToolChoice, ByName]


class StreamOptions(Strict):
    """What a stream contains besides its text."""

    include_usage: bool | None = Field(False, description="Send one more chunk at the end, with the usage.")
    include_obfuscation: bool | None = inert("chunks are not padded")
    continuous_usage_stats: bool | None = inert("the usage is told once, at the end")


class StreamedUsage(ChatRequest):
    """A body that can ask for the usage at the end of a stream."""

    stream_options: StreamOptions | None = Field(None, description="Only allowed with `stream`.")

    @model_validator(mode="after")
    def _is_streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream.", param="stream_options")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatCompletionRequest(ClientFields, TemplateFields, StreamedUsage, Conversation):
    """The JSON body of /v1/chat/completions."""

    newer_limit: ClassVar = "max_completion_tokens"
    function_path: ClassVar = ".function"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_TURNS)] = Field(
        description="A conversation that ends with a user or tool turn; user turns may have videos and images."
    )
    max_completion_tokens: Count | None = Field(None, description="The newer name of `max_tokens`.")
    audio: None = neutral(None, "this server answers with text only")
    prediction: dict[Label, Any] | None = inert("the draft model predicts the answer")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the answer may or must call; see `tool_choice`."
    )
    tool_choice: ToolChoiceField | None = Field(None, description=TOOL_CHOICE_DESCRIPTION)

    @property
    def tool_functions(self) -> list[Function]:
        return [tool.function for tool in self.tools or ()]

    @property
    def template(self) -> ChatTemplate:
        return replace(super().template, tools=self.tool_use.described)

    @property
    def placed_turns(self) -> list[PlacedTurn]:
        return placed_turns_of(self.messages)

    @property
    def sources(self) -> tuple[VideoSource, ...]:
        return tuple(part.source for turn in self.messages for part in turn.videos)

    @property
    def dialect(self) -> Dialect:
        """How to answer."""
        final = ChatCompletionChunk if self.wants_usage else None
        return ChatDialect(
            ChatCompletionResponse,
            ChatCompletionChunk,
            final,
            id_prefix="chatcmpl-",
            calls=self.tool_use.call_format,
            shows_reasoning=self.include_reasoning is not False,
        )


class ToolCallPiece(TypedDict, total=False):
    """A tool call, or the next piece of one."""

    index: int
    id: str
    type: Literal["function"]
    function: dict[str, str]  # name and arguments


class OpenAIMessage(AnswerMessage):
    """The assistant's turn."""

    content: str | None  # type: ignore[assignment]  # null beside calls
    reasoning_content: str | None = Field(None, exclude_if=is_none, description="The same as `reasoning`.")
    refusal: None = None
    tool_calls: list[ToolCallPiece] | None = Field(None, exclude_if=is_none, description="Only if tools are called.")


def _both_names(said: Any) -> Any:
    """A message or delta with its reasoning under both names: vLLM's, OpenRouter's; DeepSeek's, SGLang's."""
    return {**said, "reasoning_content": said["reasoning"]} if isinstance(said, dict) and "reasoning" in said else said


class OpenAIChoice(BaseModel):
    """One answer."""

    index: int
    message: Annotated[OpenAIMessage, BeforeValidator(_both_names)]
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str = Field(description="stop, length or tool_calls.")


class ChatCompletionResponse(ResponseBody):
    """The whole answer, when `stream` is false."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[OpenAIChoice]
    usage: Usage


class OpenAIChunkChoice(BaseModel):
    """An answer's next piece."""

    index: int
    delta: Annotated[Delta, BeforeValidator(_both_names)]
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(ResponseBody):
    """One server-sent event."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[OpenAIChunkChoice]
    usage: Usage | None = Field(None, description="Only with `include_usage`; null in all events but the last.")
