"""Requests as they come over the wire: every field, its limits, and what may not stand beside what.

A field is either honoured or refused; there is no third way. Answers are in `answers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from vidspec_service.engine.types import ChatMessage, Compression, SamplingParams, SpeculationMode
from vidspec_service.errors import InvalidRequest

MAX_TEXT = 200_000  # characters of one request; any model's context is shorter
MAX_TURNS = 256
MAX_STOPS = 4
MAX_STOP = 256
DATA_URL = "A base64 data URL, `data:video/mp4;base64,...`."


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT, pattern=r"\S")]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP)]
StopList = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
Stops = Annotated[StopList, BeforeValidator(_as_list, json_schema_input_type=StopString | StopList)]
Id = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Url = Annotated[str, StringConstraints(min_length=1, max_length=2048)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
# A form's file part; the reader puts it on disk, and only then is the form validated.
FilePart = Annotated[Path, WithJsonSchema({"type": "string", "format": "binary"})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a request's video, or an image in its stead, is; none of them: it came as a part of the form."""

    data_url: str | None = None
    video_id: str | None = None
    url: str | None = None
    is_still: bool = False


class Options(BaseModel):
    """How to answer and which frames to look at: the same in every route that answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stream: bool | None = Field(False, description="Answer with server-sent events as tokens are committed.")
    max_tokens: Count | None = Field(None, description="Most tokens of the answer; unset: the server's own.")
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = Field(
        0.0, description="0 is greedy."
    )
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = Field(
        1.0, description="Nucleus; 1 is off."
    )
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        0, description="Only the k likeliest tokens; 0 is off."
    )
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = Field(
        None, description="Same request and seed, same text. Random if not given."
    )
    stop: Stops | None = Field(
        None,
        description="Up to 4 strings that end the answer and are not in it; repeat the part in a form.",
    )
    fps: Positive | None = Field(None, description="Frames per second of video; not with `num_frames`.")
    num_frames: Count | None = Field(None, description="Frames sampled evenly; not with `fps`.")
    max_frames: Count | None = Field(None, description="Upper bound on the frames that are sampled.")
    start_s: NotNegative | None = Field(None, description="Sample from this second of the video on.")
    end_s: Positive | None = Field(None, description="Sample up to this second, exclusive.")
    speculation: SpeculationMode | None = Field(
        None, description="How draft and target share the work. It changes the speed, never the text."
    )
    compression: Compression | None = Field(
        None, description="Lossy compression of the video on the target; `dycoke` may change the text."
    )

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if self.fps is not None and self.num_frames is not None:
            raise InvalidRequest("Give fps or num_frames, not both.", param="fps")
        if self.end_s is not None and self.end_s <= (self.start_s or 0.0):
            raise InvalidRequest("end_s must be greater than start_s.", param="end_s")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; none if none were given."""
        return tuple(self.stop or ())

    def sampling(self, default_seed: int) -> SamplingParams:
        """The law of the answer; null is the same as not given."""
        return SamplingParams(
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=default_seed if self.seed is None else self.seed,
        )

    def options(self, **changed: Any) -> Options:
        """These fields alone, without the conversation and the video's bytes: a request lives long."""
        return Options.model_construct(**{name: getattr(self, name) for name in Options.model_fields} | changed)


class Message(BaseModel):
    """One turn of the conversation. The video belongs to the first user turn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"] = Field(description="Who speaks.")
    content: Text = Field(description="What is said.")


class VideoChat(Options):
    """What may be asked about one video, whatever the body's format."""

    video: Path | str | None = None
    video_id: Id | None = Field(None, description="Id of a video that was uploaded to /v1/videos.")
    video_url: Url | None = Field(None, description="https address of a video, if the operator allows its host.")
    prompt: Text | None = Field(None, description="The question; or give `messages`.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_TURNS)] | None = Field(
        None,
        description="A conversation, instead of `prompt`; it ends with a user turn. JSON text in a form.",
    )

    @model_validator(mode="after")
    def _one_video_and_one_question(self) -> Self:
        _check_source(self.video, self.video_id, self.video_url)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give exactly one of prompt and messages.", param="prompt")
        if self.messages is not None:
            check_turns([(message.role, len(message.content)) for message in self.messages])
        return self

    @property
    def turns(self) -> tuple[ChatMessage, ...]:
        """The conversation for the engine."""
        if self.messages is None:
            return (ChatMessage(role="user", text=self.prompt or "", num_videos=1),)
        first_user = next(index for index, message in enumerate(self.messages) if message.role == "user")
        return tuple(
            ChatMessage(role=message.role, text=message.content, num_videos=int(index == first_user))
            for index, message in enumerate(self.messages)
        )

    @property
    def source(self) -> Source:
        """Where the video is."""
        return _source(self.video, self.video_id, self.video_url)


class VideoChatJson(VideoChat):
    """The JSON body."""

    video: str | None = Field(None, description=DATA_URL)


class VideoChatForm(VideoChat):
    """The multipart form."""

    video: FilePart | None = Field(None, description="The video file.")


class VideoUpload(BaseModel):
    """A video to keep, whatever the body's format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    video: Path | str | None = None
    video_url: Url | None = Field(None, description="https address of a video, if the operator allows its host.")

    @model_validator(mode="after")
    def _one_video(self) -> Self:
        _check_source(self.video, self.video_url)
        return self

    @property
    def source(self) -> Source:
        """Where the video is."""
        return _source(self.video, None, self.video_url)


class VideoUploadJson(VideoUpload):
    """The JSON body."""

    video: str | None = Field(None, description=DATA_URL)


class VideoUploadForm(VideoUpload):
    """The multipart form."""

    video: FilePart | None = Field(None, description="The video file.")


def check_turns(turns: list[tuple[str, int]]) -> None:
    """Roles and lengths of a conversation's turns make sense together; raises InvalidRequest."""
    if sum(length for _, length in turns) > MAX_TEXT:
        raise InvalidRequest(f"All messages together may have {MAX_TEXT} characters.", param="messages")
    for index, (role, _) in enumerate(turns):
        if role == "system" and index > 0:
            raise InvalidRequest("A system message can only be the first.", param=f"messages.{index}.role")
    if turns[-1][0] != "user":
        raise InvalidRequest("The last message must be the user's.", param=f"messages.{len(turns) - 1}.role")


def _check_source(*given: object) -> None:
    if sum(source is not None for source in given) != 1:
        names = "video, video_id and video_url" if len(given) > 2 else "video and video_url"
        raise InvalidRequest(f"Give exactly one of {names}.", param="video")


def _source(video: Path | str | None, video_id: str | None, url: str | None) -> Source:
    return Source(data_url=video if isinstance(video, str) else None, video_id=video_id, url=url)
