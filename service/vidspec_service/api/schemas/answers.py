"""Answers as they go over the wire: completion, streamed chunks, model list, health and errors."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vidspec_models.request import SpeculationMode
from vidspec_service.api.schemas.answer_parser import Delta
from vidspec_service.api.schemas.extras import AnswerExtras, ChoiceLogprobs, TokenDetails
from vidspec_service.api.schemas.fields import Number, is_none


class AnswerMessage(BaseModel):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning: str | None = Field(None, exclude_if=is_none, description="What the model thought, if it did.")


class Choice(BaseModel):
    """One answer; there are `n`."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = Field(
        None, exclude_if=is_none, description="Only if the request sets `logprobs`."
    )
    token_details: list[TokenDetails] | None = Field(
        None, exclude_if=is_none, description="One for each token; only if `include` asks for it."
    )
    finish_reason: str = Field(description="stop or length.")


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


class VideoFacts(BaseModel):
    """Which video was seen, and which moments of it."""

    id: str = Field(description="Hash of the file's content.")
    duration_s: Number
    num_frames: int = Field(description="Frames given to the model.")
    timestamps_s: list[Number] = Field(
        description="When each frame is shown, in seconds after the video's first frame."
    )
    warnings: list[str]


class SpeculationFacts(BaseModel):
    """What speculation did for this answer."""

    model_config = ConfigDict(from_attributes=True)  # is read from the engine's SpeculationStats

    mode: SpeculationMode
    acceptance_rate: Number
    mean_accepted_tokens: Number
    draft_video_tokens: int


class Timings(BaseModel):
    """Where the time went, in seconds from the last byte of the request body."""

    queue_s: Number
    decode_s: Number
    prefill_s: Number
    time_to_first_token_s: Number
    time_per_output_token_s: Number


class Summary(BaseModel):
    """Facts about a complete answer."""

    usage: Usage
    video: VideoFacts | None = Field(description="The video, if the request has exactly one; else null.")
    videos: list[VideoFacts] = Field(description="Every video and image, in the order of the request.")
    speculation: SpeculationFacts
    timings: Timings


class ResponseBody(BaseModel):
    """The fields that every answer or event with `choices` begins with, in the order of the wire."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]


class VideoChatResponse(AnswerExtras, Summary, ResponseBody):
    """The whole answer, when `stream` is false."""

    object: Literal["video.chat.completion"] = "video.chat.completion"
    choices: list[Choice]


class ChunkChoice(BaseModel):
    """An answer's next piece."""

    index: int
    delta: Delta  # or the role, with empty content
    logprobs: ChoiceLogprobs | None = Field(None, exclude_if=is_none)
    token_details: list[TokenDetails] | None = Field(None, exclude_if=is_none)
    finish_reason: str | None = None


class VideoChatChunk(AnswerExtras, ResponseBody):
    """One server-sent event."""

    object: Literal["video.chat.completion.chunk"] = "video.chat.completion.chunk"
    choices: list[ChunkChoice]


class VideoChatFinalChunk(Summary, VideoChatChunk):
    """The last event before `[DONE]`: it has the summary and no choices."""


class ModelCard(BaseModel):
    """The model under one of its names, with OpenAI's fields and those that vLLM adds."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vidspec"
    root: str = Field(description="The hub id, or the name of the model's folder.")
    parent: None = None
    max_model_len: int = Field(description="Tokens of a prompt and its answer together.")
    default_sampling: dict[str, Number] = Field(
        description="The checkpoint's sampling defaults, for requests that leave these fields out; empty: greedy."
    )


class ModelList(BaseModel):
    """Every model that is served here."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    """The server's version."""

    version: str


class Health(BaseModel):
    """Whether the process, or the whole service, works; `reasons` says why not, `warnings` why it is slow."""

    status: Literal["ok", "unavailable"]
    reasons: list[str] = []
    warnings: list[str] | None = None  # left out where there are none


class ErrorInfo(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """Every error answer, and the error event of a stream."""

    error: ErrorInfo
