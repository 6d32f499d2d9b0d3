"""The OpenAI dialect: what its clients send, held to the same limits, and `chat.completion` field for field.

What is taken and changes nothing is listed in `client_fields`; nothing else is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from vidspec_models.request import VIDEO, Turn
from vidspec_service.api.errors import check_served
from vidspec_service.api.schemas.answers import Answer, AnswerMessage, Delta, Dialect, Usage
from vidspec_service.api.schemas.chat_parts import TextPart, VideoPart, only
from vidspec_service.api.schemas.client_fields import ClientFields, TemplateFields, TurnFields
from vidspec_service.api.schemas.fields import MAX_TURNS, Count, Source, Strict, Text, check_turns
from vidspec_service.api.schemas.logprobs import ChoiceLogprobs
from vidspec_service.api.schemas.video_chat import ChatRequest
from vidspec_service.errors import InvalidRequest

MAX_PARTS = 64


Part = Annotated[TextPart | VideoPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS)]
Content = Annotated[
    Annotated[Text, Tag("a string")] | Annotated[Parts, Tag("a list")],
    Discriminator(lambda value: "a list" if isinstance(value, list) else "a string"),
]


class ChatTurn(TurnFields):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"] = Field(description="`developer` is `system`.")
    content: Content = Field(description="Text, or parts; a user turn may have videos and images among them.")

    @property
    def text(self) -> str:
        """All that is said."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def parts(self) -> tuple[str | None, ...]:
        """As in Turn; text parts beside each other are joined by line breaks."""
        if isinstance(self.content, str):
            return (self.content,)
        parts: list[str | None] = []
        for _, group in groupby(self.content, lambda part: isinstance(part, TextPart)):
            alike = list(group)
            said = [part.text for part in alike if isinstance(part, TextPart)]
            parts += ["\n".join(said)] if said else [VIDEO] * len(alike)
        return tuple(parts)

    @property
    def videos(self) -> list[VideoPart]:
        """The videos of this turn."""
        return [] if isinstance(self.content, str) else [p for p in self.content if not isinstance(p, TextPart)]


class StreamOptions(Strict):
    """What a stream tells besides its text."""

    include_usage: bool = Field(False, description="One more chunk at the end, with the usage.")
    include_obfuscation: bool | None = Field(None, description="Taken; chunks are not padded here.")
    continuous_usage_stats: Annotated[Literal[False] | None, only(False, "the usage is told once, at the end")] = Field(
        None, description="false."
    )


class ChatCompletion(ClientFields, TemplateFields, ChatRequest):
    """The JSON body of /v1/chat/completions."""

    model: Annotated[str, Field(max_length=256)] | None = Field(None, description="The model served here, if given.")
    messages: Annotated[list[ChatTurn], Field(min_length=1, max_length=MAX_TURNS)] = Field(
        description="A conversation, with videos and images in its user turns or none; it ends with a user turn."
    )
    max_completion_tokens: Count | None = Field(None, description="The newer name of `max_tokens`.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest("Give max_completion_tokens or max_tokens, not both.", param="max_completion_tokens")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream.", param="stream_options")
        last = "assistant" if self.continue_final_message else "user"
        check_turns([(_role(turn), len(turn.text)) for turn in self.messages], last)
        for index, turn in enumerate(self.messages):
            if turn.videos and turn.role != "user":
                raise InvalidRequest("Videos and images must be in user turns.", param=f"messages.{index}.role")
        if not self.messages[-1].text:
            raise InvalidRequest("The last message must say something.", param=f"messages.{len(self.messages) - 1}")
        return self

    @property
    def turns(self) -> tuple[Turn, ...]:
        """See ChatRequest."""
        return tuple(Turn(role=_role(turn), parts=turn.parts) for turn in self.messages)

    @property
    def sources(self) -> tuple[Source, ...]:
        """See ChatRequest."""
        return tuple(part.source for turn in self.messages for part in turn.videos)

    @property
    def dialect(self) -> Dialect:
        """How to answer; a stream ends with the usage if that is wanted."""
        return _WITH_USAGE if self.stream_options is not None and self.stream_options.include_usage else _PLAIN

    def check_model(self, served: Sequence[str]) -> None:
        """See ChatRequest."""
        check_served(self.model, served)

    @property
    def most_tokens(self) -> int | None:
        """See SamplingFields."""
        return self.max_completion_tokens or self.max_tokens


def _role(turn: ChatTurn) -> str:
    return "system" if turn.role == "developer" else turn.role


class OpenAIMessage(AnswerMessage):
    """The assistant's turn."""

    refusal: None = None


class OpenAIChoice(BaseModel):
    """One answer."""

    index: int = 0
    message: OpenAIMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str = Field(description="stop or length.")


class ChatCompletionAnswer(Answer):
    """The whole answer, when `stream` is false."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[OpenAIChoice]
    usage: Usage


class OpenAIChunkChoice(BaseModel):
    """An answer's next piece."""

    index: int = 0
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(Answer):
    """One server-sent event of a stream without usage."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[OpenAIChunkChoice]


class ChatCompletionUsageChunk(ChatCompletionChunk):
    """One event of a stream with usage, which is null in all but the last."""

    usage: Usage | None = None


_PLAIN = Dialect("chatcmpl", ChatCompletionAnswer, ChatCompletionChunk, None)
_WITH_USAGE = Dialect("chatcmpl", ChatCompletionAnswer, ChatCompletionUsageChunk, ChatCompletionUsageChunk)
