"""Dialects: what one and the same generation looks like on the wire, ours and OpenAI's."""

from __future__ import annotations

from typing import Protocol

from pydantic import BaseModel

from vidspec_service.api.answers import (
    AnswerMessage,
    Choice,
    Chunk,
    ChunkChoice,
    Completion,
    Delta,
    FinalChunk,
)
from vidspec_service.api.generation import Generation
from vidspec_service.api.openai_answers import (
    ChatCompletionAnswer,
    ChatCompletionChunk,
    ChatCompletionUsageChunk,
    OpenAIChoice,
    OpenAIChunkChoice,
    OpenAIMessage,
)


class Dialect(Protocol):
    """How an answer is written."""

    id_prefix: str

    def whole(self, generation: Generation, text: str) -> BaseModel:
        """The answer of a generation that is complete."""
        ...

    def chunk(self, generation: Generation, delta: Delta, finish_reason: str | None = None) -> BaseModel:
        """One event of a stream."""
        ...

    def final(self, generation: Generation) -> BaseModel | None:
        """The last event of a stream that is complete, if it has one more."""
        ...


class NativeDialect:
    """Of /v1/video-chat: everything that is known is told."""

    id_prefix = "vchat"

    def whole(self, generation: Generation, text: str) -> BaseModel:
        """See Dialect."""
        return Completion(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=[Choice(message=AnswerMessage(content=text), finish_reason=generation.finish_reason)],
            **dict(generation.summary()),
        )

    def chunk(self, generation: Generation, delta: Delta, finish_reason: str | None = None) -> BaseModel:
        """See Dialect."""
        choice = ChunkChoice(delta=delta, finish_reason=finish_reason)
        return Chunk(id=generation.id, created=generation.created, model=generation.model, choices=[choice])

    def final(self, generation: Generation) -> BaseModel | None:
        """See Dialect."""
        return FinalChunk(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=[],
            **dict(generation.summary()),
        )


class OpenAIDialect:
    """Of /v1/chat/completions: OpenAI's fields and no others."""

    id_prefix = "chatcmpl"

    def __init__(self, *, includes_usage: bool) -> None:
        self._includes_usage = includes_usage

    def whole(self, generation: Generation, text: str) -> BaseModel:
        """See Dialect."""
        return ChatCompletionAnswer(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=[OpenAIChoice(message=OpenAIMessage(content=text), finish_reason=generation.finish_reason)],
            usage=generation.summary().usage,
        )

    def chunk(self, generation: Generation, delta: Delta, finish_reason: str | None = None) -> BaseModel:
        """See Dialect."""
        kind = ChatCompletionUsageChunk if self._includes_usage else ChatCompletionChunk
        choice = OpenAIChunkChoice(delta=delta, finish_reason=finish_reason)
        return kind(id=generation.id, created=generation.created, model=generation.model, choices=[choice])

    def final(self, generation: Generation) -> BaseModel | None:
        """See Dialect."""
        if not self._includes_usage:
            return None
        return ChatCompletionUsageChunk(
            id=generation.id,
            created=generation.created,
            model=generation.model,
            choices=[],
            usage=generation.summary().usage,
        )
