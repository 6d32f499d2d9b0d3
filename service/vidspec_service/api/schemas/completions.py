"""/v1/completions: texts to continue, without template and videos, answered as OpenAI's older `text_completion`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, model_validator

from vidspec_models.request import Turn
from vidspec_service.api.errors import check_model_name
from vidspec_service.api.schemas.chat_completions import StreamedUsage
from vidspec_service.api.schemas.client_fields import ClientFields, neutral
from vidspec_service.api.schemas.dialects import ChatDialect, Dialect, ResponseBody, Usage
from vidspec_service.api.schemas.fields import MAX_TEXT, ModelName, StringOr, TokenId, TopLogprobs, VideoSource
from vidspec_service.engine.frontend.interface import EngineInfo
from vidspec_service.errors import InvalidRequest

_OF_FRAMES = frozenset({"fps", "num_frames", "max_frames", "start_s", "end_s"})


def _unless_false(value: object) -> object:
    """Some clients send `false` for none, as in chat completions."""
    return None if value is False else value


def _as_list(prompt: object) -> object:
    """A text, or a list of token ids, is a single prompt; so is a list of what can only be meant as token ids."""
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and not isinstance((prompt or [""])[0], str | list))
    return [prompt] if is_one else prompt


NoOptions = Annotated[dict[str, Any], Field(max_length=0)]
TextPrompt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
IdsPrompt = Annotated[list[TokenId], Field(min_length=1)]
Prompt = StringOr[TextPrompt, IdsPrompt]
PromptList = Annotated[list[Prompt], Field(min_length=1)]  # `Admission` bounds their number
Prompts = Annotated[PromptList, BeforeValidator(_as_list, json_schema_input_type=TextPrompt | IdsPrompt | PromptList)]


class CompletionRequest(ClientFields, ModelName, StreamedUsage):
    """The JSON body."""

    prompt: Prompts = Field(
        description="A text to continue, used as it is: no template, no roles; or token ids, to which nothing is "
        "added. Or a list of such prompts: answer j to prompt i has the index `n` * i + j, and uses the seed `seed` + "
        "that index."
    )
    suffix: Literal[""] | None = neutral("", "this server completes at the end only")
    add_special_tokens: Literal[True] | None = neutral(
        True, "the tokenizer's first token, if it has one, comes before every text"
    )
    logprobs: Annotated[TopLogprobs | None, BeforeValidator(_unless_false)] = Field(  # type: ignore[assignment]
        None, description="Return each token's log probability, and this many of the most likely tokens beside it."
    )
    mm_processor_kwargs: NoOptions | None = neutral({}, "there are no videos here")
    media_io_kwargs: NoOptions | None = neutral({}, "there are no videos here")
    top_logprobs: Literal[0] | None = neutral(0, "here logprobs is the number")

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if of_frames := [name for name in sorted(_OF_FRAMES) if self._is_given(name)]:
            raise InvalidRequest("There are no videos here to choose frames of.", param=of_frames[0])
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[tuple[Turn, ...]]:
        return [
            (
                Turn(role="user", parts=(each,))
                if isinstance(each, str)
                else Turn(role="user", parts=(), token_ids=tuple(each)),
            )
            for each in self.prompt
        ]

    @property
    def template(self) -> None:
        return None

    @property
    def sources(self) -> tuple[VideoSource, ...]:
        return ()

    @property
    def dialect(self) -> Dialect:
        """How to answer."""
        final = CompletionChunk if self.wants_usage else None
        return ChatDialect(CompletionResponse, CompletionChunk, final, names_role=False, id_prefix="cmpl-")

    def for_engine(self, info: EngineInfo) -> Self:
        check_model_name(self.model, info.model_names)
        return super().for_engine(info)


class TextLogprobs(BaseModel):
    """One of each for each token of the answer, or of a chunk."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="Where the token begins in the answer's text, in characters.")

    @model_validator(mode="before")
    @classmethod
    def _of_content(cls, logprobs: Mapping[str, Any]) -> dict[str, Any]:
        """From what `logprobs_fields` returns."""
        fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for each in logprobs["content"]:  # one by one: see ChoiceLogprobs
            fields["tokens"].append(each["token"])
            fields["token_logprobs"].append(each["logprob"])
            top: dict[str, float] = {}
            for likely in (*each["top_logprobs"], each):  # OpenAI's API has the token itself among them, too
                top.setdefault(likely["token"], likely["logprob"])  # parts of characters look alike: the likeliest
            fields["top_logprobs"].append(top)
            fields["text_offset"].append(each["offset"])
        return fields


class TextChoice(BaseModel):
    """One answer, or its next piece."""

    index: int
    text: str
    logprobs: TextLogprobs | None = Field(None, description="Only if the request sets `logprobs`.")
    finish_reason: str | None = Field(None, description="stop or length.")

    @model_validator(mode="before")
    @classmethod
    def _of_message(cls, choice: Mapping[str, Any]) -> dict[str, Any]:
        """`text` is the content of what a chat choice has as `message` or `delta`."""
        said = choice.get("message") or choice.get("delta") or {}
        return {**choice, "text": said.get("content", "")}


class CompletionResponse(ResponseBody):
    """The whole answer, when `stream` is false."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage


class CompletionChunk(ResponseBody):
    """One server-sent event."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = Field(None, description="Only with `include_usage`; null in all events but the last.")
