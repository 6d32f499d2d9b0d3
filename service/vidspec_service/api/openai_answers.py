"""The OpenAI dialect's answers: `chat.completion` and its chunks, field for field."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from vidspec_service.api.answers import Delta, Usage


class OpenAIMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class OpenAIChoice(BaseModel):
    """The one answer there is."""

    index: int = 0
    message: OpenAIMessage
    logprobs: None = None
    finish_reason: str = Field(description="stop or length.")


class ChatCompletionAnswer(BaseModel):
    """The whole answer, when `stream` is false."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[OpenAIChoice]
    usage: Usage


class OpenAIChunkChoice(BaseModel):
    """The one answer's next piece."""

    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None


class ChatCompletionChunk(BaseModel):
    """One server-sent event of a stream without usage."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[OpenAIChunkChoice]


class ChatCompletionUsageChunk(ChatCompletionChunk):
    """One event of a stream with usage, which is null in all but the last."""

    usage: Usage | None = None
