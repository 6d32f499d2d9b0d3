"""Requests as they come over the wire: every field, its limits, and what may not stand beside what.

A field is either honoured or refused; there is no third way. Answers are in `answers.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from vidspec_service.engine.types import Compression, SpeculationMode
from vidspec_service.errors import InvalidRequest

MAX_TEXT = 200_000  # characters of one request; any model's context is shorter
MAX_TURNS = 256
MAX_STOPS = 4
MAX_STOP = 256


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT, pattern=r"\S")]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP)]
StopList = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
Stops = Annotated[StopList, BeforeValidator(_as_list, json_schema_input_type=StopString | StopList)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
# A form's file part; the reader puts it on disk, and only then is the form validated.
FilePart = Annotated[Path, WithJsonSchema({"type": "string", "format": "binary"})]


class Message(BaseModel):
    """One turn of the conversation. The video belongs to the first user turn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"] = Field(description="Who speaks.")
    content: Text = Field(description="What is said.")


class VideoChat(BaseModel):
    """What may be asked about one video, whatever the body's format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    video: Path | str | None = None
    video_id: str | None = Field(None, description="Id of a kept upload. This version keeps none: 404.")
    video_url: str | None = Field(None, description="Address of a video. This version fetches none: 400.")
    prompt: Text | None = Field(None, description="The question; or give `messages`.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_TURNS)] | None = Field(
        None,
        description="A conversation, instead of `prompt`; it ends with a user turn. JSON text in a form.",
    )
    stream: bool = Field(False, description="Answer with server-sent events as tokens are committed.")
    max_tokens: Count | None = Field(None, description="Most tokens of the answer; unset: the server's own.")
    temperature: float = Field(0.0, ge=0, le=2, allow_inf_nan=False, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False, description="Nucleus; 1 is off.")
    top_k: int = Field(0, ge=0, le=2**31 - 1, description="Only the k likeliest tokens; 0 is off.")
    seed: int | None = Field(
        None, ge=0, le=2**64 - 1, description="Same request and seed, same text. Random if not given."
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
        None, description="Lossy compression, which may change the text. This version has none but `none`."
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if sum(source is not None for source in (self.video, self.video_id, self.video_url)) != 1:
            raise InvalidRequest("Give exactly one of video, video_id and video_url.", param="video")
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give exactly one of prompt and messages.", param="prompt")
        if self.fps is not None and self.num_frames is not None:
            raise InvalidRequest("Give fps or num_frames, not both.", param="fps")
        if self.end_s is not None and self.end_s <= (self.start_s or 0.0):
            raise InvalidRequest("end_s must be greater than start_s.", param="end_s")
        if self.messages is not None:
            _check_turns(self.messages)
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; none if none were given."""
        return tuple(self.stop or ())


class VideoChatJson(VideoChat):
    """The JSON body."""

    video: str | None = Field(None, description="A base64 data URL, `data:video/mp4;base64,...`.")


class VideoChatForm(VideoChat):
    """The multipart form."""

    video: FilePart | None = Field(None, description="The video file.")


def _check_turns(messages: list[Message]) -> None:
    if sum(len(message.content) for message in messages) > MAX_TEXT:
        raise InvalidRequest(f"All messages together may have {MAX_TEXT} characters.", param="messages")
    for index, message in enumerate(messages):
        if message.role == "system" and index > 0:
            raise InvalidRequest("A system message can only be the first.", param=f"messages.{index}.role")
    if messages[-1].role != "user":
        last = len(messages) - 1
        raise InvalidRequest("The last message must be the user's.", param=f"messages.{last}.role")
