"""/v1/video-chat: its bodies, JSON or a form, and its answers, which have a field for every known fact."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from vidspec_models.request import VIDEO, Include, SpeculationMode, Turn
from vidspec_service.api.schemas.answer_parser import Delta
from vidspec_service.api.schemas.chat_messages import check_conversation
from vidspec_service.api.schemas.chat_request import ChatRequest
from vidspec_service.api.schemas.dialects import AnswerMessage, ChatDialect, Dialect, ResponseBody, Usage
from vidspec_service.api.schemas.extras import AnswerExtras, ChoiceLogprobs, TokenDetails
from vidspec_service.api.schemas.fields import (
    DATA_URL,
    MAX_TURNS,
    FormFile,
    FrameTimes,
    Id,
    MessageText,
    NonBlankText,
    Number,
    Strict,
    Url,
    VideoSource,
    exactly_one_of,
    is_none,
)
from vidspec_service.errors import InvalidRequest

MAX_VIDEOS = 1000  # in a body; the operator's setting for a request is checked later
_VIDEO_ID = "Id of a video that was uploaded to /v1/videos."
_VIDEO_URL = "https address of a video, if the operator allows its host."


class Message(Strict):
    """One turn of the conversation. The videos belong to the first user turn."""

    role: Literal["system", "user", "assistant"] = Field(description="Whose turn it is.")
    content: MessageText = Field(description="The text; a user's must not be empty.")


class VideoChat(ChatRequest):
    """What may be asked about videos, whatever the body's format."""

    prompt: NonBlankText | None = Field(None, description="The question; or give `messages`.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_TURNS)] | None = Field(
        None,
        description="A conversation, instead of `prompt`; it ends with a user turn. JSON text in a form.",
    )
    include: Annotated[list[Include], Field(max_length=len(Include))] | None = Field(
        None, description="What else to return: what wrote each token, what the draft saw, when each worker worked."
    )

    _one_question = exactly_one_of("prompt", "messages", param="prompt")

    @model_validator(mode="after")
    def _turns_agree(self) -> Self:
        if self.messages is not None:
            check_conversation([(f"messages.{index}", turn) for index, turn in enumerate(self._said)])
        return self

    @property
    def dialect(self) -> Dialect:
        return VIDEO_CHAT_DIALECT

    @property
    def included(self) -> frozenset[Include]:
        return frozenset(self.include or ())

    @property
    def prompts(self) -> list[tuple[Turn, ...]]:
        """The videos come before the first thing that the user says."""
        turns = self._said
        index, first = next((index, turn) for index, turn in enumerate(turns) if turn.role == "user")
        turns[index] = replace(first, parts=((VIDEO,) * len(self.sources) + first.parts))
        return [tuple(turns)]

    @property
    def _said(self) -> list[Turn]:
        """The turns without videos."""
        if self.messages is None:
            return [Turn(role="user", parts=(self.prompt or "",))]
        return [Turn(role=message.role, parts=(message.content,)) for message in self.messages]


class VideoRef(FrameTimes):
    """One of several videos."""

    video: str | None = Field(None, description=DATA_URL)
    video_id: Id | None = Field(None, description=_VIDEO_ID)
    video_url: Url | None = Field(None, description=_VIDEO_URL)

    _one_place = exactly_one_of("video", "video_id", "video_url", param="videos", where=" for each video")

    @property
    def source(self) -> VideoSource:
        """Where the video is."""
        return VideoSource(data_url=self.video, video_id=self.video_id, url=self.video_url, times=self.times)


class VideoChatJson(VideoChat):
    """The JSON body."""

    video: str | None = Field(None, description=DATA_URL)
    video_id: Id | None = Field(None, description=_VIDEO_ID)
    video_url: Url | None = Field(None, description=_VIDEO_URL)
    videos: Annotated[list[VideoRef], Field(max_length=MAX_VIDEOS)] | None = Field(
        None, description="Any number of videos, in this order, instead of the three fields for a single one."
    )

    @model_validator(mode="after")
    def _one_way_to_give_videos(self) -> Self:
        if sum(given is not None for given in (self.video, self.video_id, self.video_url, self.videos)) > 1:
            raise InvalidRequest("Give only one of video, video_id, video_url and videos.", param="video")
        return self

    @property
    def sources(self) -> tuple[VideoSource, ...]:
        if self.videos is not None:
            return tuple(each.source for each in self.videos)
        one = VideoSource(data_url=self.video, video_id=self.video_id, url=self.video_url)
        return () if one == VideoSource() else (one,)


class VideoChatForm(VideoChat):
    """The multipart form. `video`, `video_id`, `video_url` may be repeated and mixed; videos come in their order."""

    repeated: ClassVar = frozenset({"video", "video_id", "video_url", "stop", "bad_words", "stop_token_ids", "include"})

    video: list[FormFile] = Field([], description="A video file; repeat the part for several.")
    video_id: list[Id] = Field([], description=_VIDEO_ID)
    video_url: list[Url] = Field([], description=_VIDEO_URL)
    _parts: tuple[str, ...] = PrivateAttr(())

    def model_post_init(self, names: Any) -> None:
        """`names` are the names of the form's parts, in their order."""
        self._parts = tuple(names or ())

    @property
    def sources(self) -> tuple[VideoSource, ...]:
        given = {
            "video": (VideoSource(file=file) for file in self.video),
            "video_id": (VideoSource(video_id=video_id) for video_id in self.video_id),
            "video_url": (VideoSource(url=url) for url in self.video_url),
        }
        return tuple(next(given[name]) for name in self._parts if name in given)


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


VIDEO_CHAT_DIALECT = ChatDialect(VideoChatResponse, VideoChatChunk, VideoChatFinalChunk, id_prefix="vchat-")
