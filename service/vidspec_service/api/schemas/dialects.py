"""How each API writes a generation on the wire: as one body, or as server-sent events. Pure: text in, text out.

The models here are what the answers of several APIs have in common.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from vidspec_models.request import Reasoning
from vidspec_service.api.schemas.answer_parser import AnswerParser, CallFormat, message_from
from vidspec_service.api.schemas.fields import is_none
from vidspec_service.engine.types import TextDelta

Facts = Mapping[str, Any]
TakeExtras = Callable[[], Facts]
# Clients that split lines as Python does, with httpx for one, would split events at these; JSON has an escape for each.
_LINE_ENDS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}


class AnswerMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning: str | None = Field(None, exclude_if=is_none, description="What the model thought, if it did.")


class PromptTokensDetails(BaseModel):
    """What the prompt consisted of."""

    video_tokens: int
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Tokens up to `</think>`; how many of the draft's proposals the target accepted and rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """Tokens, as the target model counts them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ResponseBody(BaseModel):
    """The fields that every answer or event with `choices` begins with, in the order of the wire."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]


@dataclass(frozen=True, slots=True)
class FullChoice:
    """One complete answer."""

    pieces: Sequence[TextDelta]  # as they came
    token_info: Callable[[Sequence[TextDelta]], Facts]  # of pieces: `logprobs` and `token_details`, if asked for
    finish_reason: str
    reasoning: Reasoning = Reasoning.NONE


class EventWriter(ABC):
    """Writes the events of one stream. Every string that a method yields is one or more whole events, never empty."""

    def on_start(self) -> Iterator[str]:
        """The engine has accepted the request."""
        yield from ()

    @abstractmethod
    def on_text(self, choice: int, text: str, token_info: Facts) -> Iterator[str]:
        """Text of an answer was committed; the first piece ends the prefill. for `token_info` see FullChoice."""

    @abstractmethod
    def on_choice_end(self, choice: int, finish_reason: str) -> Iterator[str]:
        """An answer is complete."""

    @abstractmethod
    def on_end(self, facts: Facts) -> Iterator[str]:
        """All answers are complete."""

    @abstractmethod
    def on_error(self, error: Facts) -> Iterator[str]:
        """The answers cannot be completed; `error` is the body of an error answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect(ABC):
    """How one API writes its answers."""

    id_prefix: str
    calls: CallFormat | None = None  # how tool calls are written in the text; None: there are none
    shows_reasoning: bool = True

    def parser(self, reasoning: Reasoning) -> AnswerParser:
        """For the text of one answer."""
        return AnswerParser(self.calls, reasoning, shows_reasoning=self.shows_reasoning)

    @abstractmethod
    def full_body(self, head: Facts, choices: Sequence[FullChoice], facts: Facts) -> str:
        """The body of an answer that is not streamed: `head` is id, created and model, `facts` as in `Summary`."""

    @abstractmethod
    def events(self, head: Facts, take_extras: TakeExtras, reasoning: Reasoning = Reasoning.NONE) -> EventWriter:
        """The writer of one stream; `take_extras` returns what is new since its last call."""


@dataclass(frozen=True, slots=True)
class ChatDialect(Dialect):
    """Answers with `choices`. Each model is given all known facts and keeps those that it has fields for."""

    answer: type[BaseModel]
    chunk: type[BaseModel]  # one event of a stream
    final: type[BaseModel] | None  # the last event of a complete stream; None: no event has the usage
    names_role: bool = True  # the first event of a stream has the role

    def full_body(self, head: Facts, choices: Sequence[FullChoice], facts: Facts) -> str:
        written = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return self.answer.model_validate({**head, "choices": written, **facts}).model_dump_json()

    def _choice(self, index: int, choice: FullChoice) -> dict[str, Any]:
        parser = self.parser(choice.reasoning)
        deltas = parser.push("".join(piece.text for piece in choice.pieces))
        last, reason = parser.finish(choice.finish_reason)
        message = message_from([*deltas, *last])
        return {"index": index, "message": message, **choice.token_info(choice.pieces), "finish_reason": reason}

    def events(self, head: Facts, take_extras: TakeExtras, reasoning: Reasoning = Reasoning.NONE) -> EventWriter:
        return ChunkWriter(self, head, take_extras, reasoning)


class ChunkWriter(EventWriter):
    """The role is sent with the first text, as vLLM does: clients take the first event for the first token."""

    def __init__(self, dialect: ChatDialect, head: Facts, take_extras: TakeExtras, reasoning: Reasoning) -> None:
        self._dialect = dialect
        self._head = head
        self._take_extras = take_extras
        self._reasoning = reasoning
        self._parsers: list[AnswerParser] = []  # of the answers that have begun

    def on_text(self, choice: int, text: str, token_info: Facts) -> Iterator[str]:
        yield from self._begin(choice)
        deltas = self._parsers[choice].push(text)
        for delta in deltas or ([{"content": ""}] if token_info else []):
            yield self._chunk(choice, delta, token_info)
            token_info = {}

    def on_choice_end(self, choice: int, finish_reason: str) -> Iterator[str]:
        yield from self._begin(choice)
        deltas, reason = self._parsers[choice].finish(finish_reason)
        for delta in deltas:
            yield self._chunk(choice, delta, {})
        yield self._chunk(choice, {}, {"finish_reason": reason})

    def on_end(self, facts: Facts) -> Iterator[str]:
        if self._dialect.final is not None:
            final = self._dialect.final.model_validate({**self._head, "choices": [], **facts, **self._take_extras()})
            yield sse(final.model_dump_json())
        yield sse("[DONE]")

    def on_error(self, error: Facts) -> Iterator[str]:
        yield sse(json.dumps(error, ensure_ascii=False))
        yield sse("[DONE]")

    def _begin(self, choice: int) -> Iterator[str]:
        """The role, unless this answer has begun; those before it begin, too: OpenAI's client wants them in order."""
        for index in range(len(self._parsers), choice + 1):
            self._parsers.append(self._dialect.parser(self._reasoning))
            if self._dialect.names_role:
                yield self._chunk(index, {"role": "assistant", "content": ""}, {})

    def _chunk(self, index: int, delta: Facts, rest: Facts) -> str:
        """An event with what is new of an answer."""
        choice = {"index": index, "delta": delta, **rest}
        chunk = self._dialect.chunk.model_validate({**self._head, "choices": [choice], **self._take_extras()})
        return sse(chunk.model_dump_json(exclude=None if self._dialect.final else {"usage"}))


def sse(data: str, event: str | None = None) -> str:
    """A server-sent event."""
    data = data.translate(_LINE_ENDS)
    return f"data: {data}\n\n" if event is None else f"event: {event}\ndata: {data}\n\n"
