"""/v1/completions: a text to continue, without template and videos, answered as OpenAI's older `text_completion`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, model_validator

from vidspec_models.request import Turn
from vidspec_service.api.errors import check_served
from vidspec_service.api.schemas.answers import Answer, Usage
from vidspec_service.api.schemas.chat_completions import StreamedUsage
from vidspec_service.api.schemas.client_fields import ClientFields, only
from vidspec_service.api.schemas.dialects import ChatDialect, Dialect
from vidspec_service.api.schemas.fields import MAX_TEXT, ModelName, Source
from vidspec_service.engine.frontend.interface import EngineInfo
from vidspec_service.errors import InvalidRequest

_NO_LOGPROBS = "for log probabilities use /v1/chat/completions"
_OF_FRAMES = frozenset({"fps", "num_frames", "max_frames", "start_s", "end_s"})


def _the_only(prompt: object) -> object:
    """LangChain and others send even a single prompt as a list."""
    if not isinstance(prompt, list):
        return prompt
    if len(prompt) != 1:
        raise ValueError("give one text, or a list of one; for several texts send several requests")
    return prompt[0]


Prompt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
OnePrompt = Annotated[
    Prompt,
    BeforeValidator(
        _the_only, json_schema_input_type=Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=1)]
    ),
]


class TextCompletion(ClientFields, ModelName, StreamedUsage):
    """The JSON body."""

    prompt: OnePrompt = Field(
        description="The text to continue, used as it is: no template, no roles. It may be in a list of one."
    )
    suffix: Annotated[Literal[""] | None, only("", "this server completes at the end only")] = Field(
        None, description="Only an empty string is accepted."
    )
    add_special_tokens: Annotated[
        Literal[True] | None, only(True, "the tokenizer's first token, if it has one, comes before every text")
    ] = Field(None, description="Only `true` is accepted.")
    logprobs: Annotated[Literal[False] | None, only(False, _NO_LOGPROBS)] = Field(
        None, description="Only `false` is accepted."
    )
    top_logprobs: Annotated[Literal[0] | None, only(0, _NO_LOGPROBS)] = Field(None, description="Only 0 is accepted.")

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if of_frames := [name for name in sorted(_OF_FRAMES) if self._says(name)]:
            raise InvalidRequest("There are no videos here to choose frames of.", param=of_frames[0])
        return self

    @property
    def turns(self) -> tuple[Turn, ...]:
        """See ChatRequest."""
        return (Turn(role="user", parts=(self.prompt,)),)

    @property
    def template(self) -> None:
        """See ChatRequest."""
        return None

    @property
    def sources(self) -> tuple[Source, ...]:
        """See ChatRequest: none."""
        return ()

    @property
    def dialect(self) -> Dialect:
        """How to answer."""
        final = CompletionChunk if self.wants_usage else None
        return ChatDialect("cmpl-", CompletionAnswer, CompletionChunk, final, names_role=False)

    def for_engine(self, info: EngineInfo) -> Self:
        """See ChatRequest."""
        check_served(self.model, info.model_names)
        return super().for_engine(info)


class TextChoice(BaseModel):
    """One answer, or its next piece."""

    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: str | None = Field(None, description="stop or length.")

    @model_validator(mode="before")
    @classmethod
    def _of_message(cls, choice: Mapping[str, Any]) -> dict[str, Any]:
        """`text` is the content of what a chat choice has as `message` or `delta`."""
        said = choice.get("message") or choice.get("delta") or {}
        text = said.get("content", "")
        return {"index": choice["index"], "text": text, "finish_reason": choice.get("finish_reason")}


class CompletionAnswer(Answer):
    """The whole answer, when `stream` is false."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage


class CompletionChunk(Answer):
    """One server-sent event."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = Field(None, description="Only with `include_usage`; null in all events but the last.")
