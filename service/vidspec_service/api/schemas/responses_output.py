"""Answers of /v1/responses: a list of items, whole or as OpenAI's named events."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, Field

from vidspec_models.request import Reasoning
from vidspec_service.api.schemas.answer_parser import Delta
from vidspec_service.api.schemas.dialects import Dialect, EventWriter, Facts, FullChoice, TakeExtras, sse

Item = dict[str, Any]


class InputTokensDetails(BaseModel):
    """What the prompt consisted of."""

    cached_tokens: int
    cache_write_tokens: int = Field(0, description="Always 0: what is cached, without being asked, is no extra work.")
    video_tokens: int


class OutputTokensDetails(BaseModel):
    """What the answer consisted of."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens, as the target model counts them."""

    # The aliases are the names that the other dialects have for these fields.
    input_tokens: int = Field(validation_alias="prompt_tokens")
    input_tokens_details: InputTokensDetails = Field(validation_alias="prompt_tokens_details")
    output_tokens: int = Field(validation_alias="completion_tokens")
    output_tokens_details: OutputTokensDetails = Field(validation_alias="completion_tokens_details")
    total_tokens: int


class ResponsesResponse(BaseModel):
    """The whole answer, or its state in an event."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[Item] = Field(description="What the model thought, messages and tool calls.")
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    store: bool = False
    temperature: float = 0.0
    text: dict[str, Any]
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseDialect(Dialect):
    """`asked` has the fields of the request that its answer repeats."""

    id_prefix: str = "resp_"
    asked: Mapping[str, Any]

    def full_body(self, head: Facts, choices: Sequence[FullChoice], facts: Facts) -> str:
        """The items are those that a stream of the same text would have."""
        (choice,) = choices
        events = _ResponseEventWriter(self, head, choice.reasoning)
        texts = (events.on_text(0, piece.text, choice.token_info([piece])) for piece in choice.pieces)
        for _ in chain(*texts, events.on_choice_end(0, choice.finish_reason)):
            pass  # only `events.output` is needed
        return _json(self.response(head, events.output, choice.finish_reason, facts).model_dump())

    def events(self, head: Facts, take_extras: TakeExtras, reasoning: Reasoning = Reasoning.NONE) -> EventWriter:
        return _ResponseEventWriter(self, head, reasoning)

    def response(
        self, head: Facts, output: list[Item], finish_reason: str | None = None, facts: Facts | None = None
    ) -> ResponsesResponse:
        """The answer as far as it is known."""
        is_cut = finish_reason == "length"
        return ResponsesResponse(
            id=head["id"],
            created_at=head["created"],
            model=head["model"],
            status="in_progress" if finish_reason is None else "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=output,
            usage=None if facts is None else ResponseUsage.model_validate(facts["usage"]),
            **self.asked,
        )


class _ResponseEventWriter(EventWriter):
    def __init__(self, dialect: ResponseDialect, head: Facts, reasoning: Reasoning) -> None:
        self._dialect = dialect
        self._head = head
        self._parser = dialect.parser(reasoning)
        self.output: list[Item] = []
        self._num_characters = 0  # of the text so far
        # Where each token begins that begins after it (they may become a stop string), and what is told of it.
        # As JSON, which is written once: four events at the end repeat what may be many megabytes.
        self._tokens = deque[tuple[int, msgspec.Raw]]()
        self._logprobs: list[msgspec.Raw] = []  # of tokens before these, whose text is still held back
        self._num_events = 0
        self._finish_reason = ""

    def on_start(self) -> Iterator[str]:
        response = self._dialect.response(self._head, []).model_dump()
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def on_text(self, choice: int, text: str, token_info: Facts) -> Iterator[str]:
        begin, done = self._num_characters, 0
        self._num_characters += len(text)
        for token in token_info.get("logprobs", {}).get("content", ()):
            self._tokens.append((token.pop("offset"), msgspec.Raw(msgspec.json.encode(token))))
        # One by one: of tokens that come together, some may belong to what the model thinks, or to a call.
        while self._tokens and self._tokens[0][0] <= self._num_characters:
            offset, token = self._tokens.popleft()
            yield from self._push(text[done : offset - begin])
            done = offset - begin
            self._begin(token)
        yield from self._push(text[done:])

    def _begin(self, token: msgspec.Raw) -> None:
        """All text before this token was pushed."""
        if self._parser.is_thinking:
            self._logprobs = []  # reasoning has none
        else:
            self._logprobs.append(token)

    def _push(self, text: str) -> Iterator[str]:
        for delta in self._parser.push(text):
            yield from self._on_delta(delta)
        if self.output and self.output[-1]["type"] == "function_call" and not self._parser.is_calling:
            yield from self._close()  # at once: clients run a tool as soon as they are told that its call is complete

    def on_choice_end(self, choice: int, finish_reason: str) -> Iterator[str]:
        self._finish_reason = finish_reason
        for _, token in self._tokens:  # a stop string, or the end of its text
            self._begin(token)
        deltas, _ = self._parser.finish(finish_reason)
        for delta in deltas:
            yield from self._on_delta(delta)
        if not self.output or (self.output[-1]["type"] == "reasoning" and finish_reason == "stop"):
            yield from self._open(_message())
        yield from self._close(self._last_status())

    def on_end(self, facts: Facts) -> Iterator[str]:
        response = self._dialect.response(self._head, self.output, self._finish_reason, facts)
        yield self._event(f"response.{response.status}", response=response.model_dump())

    def on_error(self, error: Facts) -> Iterator[str]:
        if self.output:
            self.output[-1]["status"] = self._last_status()
        response = self._dialect.response(self._head, self.output).model_dump()
        reason = {"code": "server_error", "message": error["error"]["message"]}
        yield self._event("response.failed", response={**response, "status": "failed", "error": reason})

    def _last_status(self) -> str:
        """The status of the last item if no text follows; what comes before the cut of an answer may be whole."""
        is_whole = {
            "reasoning": not self._parser.is_thinking,
            "message": self._finish_reason == "stop",
            "function_call": not self._parser.is_calling,
        }
        return "completed" if is_whole[self.output[-1]["type"]] else "incomplete"

    def _on_delta(self, delta: Delta) -> Iterator[str]:
        if thought := delta.get("reasoning"):
            yield from self._on_words("reasoning", thought)
        for piece in delta.get("tool_calls", ()):
            function = piece["function"]
            if "id" in piece:
                self._logprobs = []  # a call has none
                yield from self._open(_call(piece["id"], function["name"]))
            if function["arguments"]:
                self.output[-1]["arguments"] += function["arguments"]
                yield self._item_event("response.function_call_arguments.delta", delta=function["arguments"])
        if text := delta.get("content"):
            yield from self._on_words("message", text)

    def _on_words(self, kind: str, text: str) -> Iterator[str]:
        """More text of an item of this type, which is opened with its first text."""
        if not self.output or self.output[-1]["type"] != kind:
            yield from self._open(_message() if kind == "message" else _reasoning())
        (part,) = self.output[-1]["content"]
        part["text"] += text
        told: dict[str, Any] = {}
        if kind == "message":
            told["logprobs"], self._logprobs = self._logprobs, []
            if told["logprobs"]:
                part.setdefault("logprobs", []).extend(told["logprobs"])
        yield self._item_event(f"response.{part['type']}.delta", content_index=0, delta=text, **told)

    def _open(self, item: Item) -> Iterator[str]:
        yield from self._close()
        self.output.append(item)
        if item["type"] != "function_call":
            yield self._place_event("response.output_item.added", item={**item, "content": []})
            yield self._item_event("response.content_part.added", content_index=0, part=item["content"][0])
        else:
            yield self._place_event("response.output_item.added", item=item)

    def _close(self, status: str = "completed") -> Iterator[str]:
        """End the last item, if it is open."""
        if not self.output or self.output[-1]["status"] != "in_progress":
            return
        item = self.output[-1]
        item["status"] = status
        if item["type"] != "function_call":
            (part,) = item["content"]
            told = {"text": part["text"]}
            if item["type"] == "message":
                if self._logprobs:  # of tokens that add no text, such as the end token
                    yield from self._on_words("message", "")
                told["logprobs"] = part.get("logprobs", [])
            yield self._item_event(f"response.{part['type']}.done", content_index=0, **told)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            call = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **call)
        yield self._place_event("response.output_item.done", item=item)

    def _item_event(self, kind: str, **fields: Any) -> str:
        return self._place_event(kind, item_id=self.output[-1]["id"], **fields)

    def _place_event(self, kind: str, **fields: Any) -> str:
        return self._event(kind, output_index=len(self.output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return sse(_json(event), kind)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _message() -> Item:
    part = {"type": "output_text", "text": "", "annotations": []}
    return _item("msg", "message", role="assistant", content=[part])


def _reasoning() -> Item:
    return _item("rs", "reasoning", summary=[], content=[{"type": "reasoning_text", "text": ""}])


def _call(call_id: str, name: str) -> Item:
    return _item("fc", "function_call", call_id=call_id, name=name, arguments="")


def _item(prefix: str, kind: str, **fields: Any) -> Item:
    return {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields}
