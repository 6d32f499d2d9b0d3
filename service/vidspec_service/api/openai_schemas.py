"""The OpenAI dialect's request: what its clients send, held to the same limits. Nothing is taken and ignored.

OpenAI's own schema knows no video. `video_url` parts are vLLM's and SGLang's, `input_video` is llama.cpp's, and a
`file` part with a `file_id` is how OpenAI's own names an upload.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from vidspec_service.api.schemas import MAX_TURNS, Count, Id, Options, Source, Text, check_turns
from vidspec_service.engine.types import ChatMessage
from vidspec_service.errors import InvalidRequest

MAX_PARTS = 64


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TextPart(_Strict):
    """Something said."""

    type: Literal["text"]
    text: Text


class VideoUrl(_Strict):
    """Where a video is."""

    url: str = Field(min_length=1, description="`data:video/...;base64,...`, or https if the operator allows the host.")


class VideoUrlPart(_Strict):
    """A video, as vLLM and SGLang take it."""

    type: Literal["video_url"]
    video_url: VideoUrl

    @property
    def source(self) -> Source:
        """Where the video is."""
        return _by_url(self.video_url.url)


class InputVideo(_Strict):
    """A video's bytes, or where it is."""

    data: str | None = Field(None, min_length=1, description="Base64, bare or as a data URL.")
    url: str | None = Field(None, min_length=1, description="As in a video_url part.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.data is None) == (self.url is None):
            raise InvalidRequest("Give exactly one of data and url in input_video.", param="messages")
        return self


class InputVideoPart(_Strict):
    """A video, as llama.cpp takes it."""

    type: Literal["input_video"]
    input_video: InputVideo

    @property
    def source(self) -> Source:
        """Where the video is."""
        data = self.input_video.data
        if data is None:
            return _by_url(self.input_video.url or "")
        return Source(data_url=data if data.startswith("data:") else f"data:video/mp4;base64,{data}")


class FileRef(_Strict):
    """The id of an upload."""

    file_id: Id


class FilePart(_Strict):
    """A video that was uploaded to /v1/videos."""

    type: Literal["file"]
    file: FileRef

    @property
    def source(self) -> Source:
        """Where the video is."""
        return Source(video_id=self.file.file_id)


VideoPart = VideoUrlPart | InputVideoPart | FilePart
Part = Annotated[TextPart | VideoPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS)]
Content = Annotated[
    Annotated[Text, Tag("a string")] | Annotated[Parts, Tag("a list")],
    Discriminator(lambda value: "a list" if isinstance(value, list) else "a string"),
]


class ChatTurn(_Strict):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"] = Field(description="`developer` is `system`.")
    content: Content = Field(description="Text, or parts; a user turn may have the video among them.")
    refusal: None = Field(None, description="As in the answers that are sent back here; null.")

    @property
    def text(self) -> str:
        """All that is said."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def videos(self) -> list[VideoPart]:
        """The videos of this turn."""
        return [] if isinstance(self.content, str) else [p for p in self.content if not isinstance(p, TextPart)]


def _only(neutral: object, because: str) -> BeforeValidator:
    """For a field of OpenAI's that is not honoured here: what means *not wanted* passes, the rest is told why not."""

    def check(value: object) -> object:
        if value is not None and value != neutral:
            raise ValueError(because)
        return value

    return BeforeValidator(check)


_NO_LOGPROBS = "this server gives no log probabilities"
_NO_PENALTY = "this server has no penalties: they would change the text that speculation must keep"


class StreamOptions(_Strict):
    """What a stream tells besides its text."""

    include_usage: bool = Field(False, description="One more chunk at the end, with the usage.")


class ChatCompletion(Options):
    """The JSON body of /v1/chat/completions."""

    model: Annotated[str, Field(max_length=256)] | None = Field(None, description="The model served here, if given.")
    messages: Annotated[list[ChatTurn], Field(min_length=1, max_length=MAX_TURNS)] = Field(
        description="A conversation with exactly one video in it; it ends with a user turn."
    )
    max_completion_tokens: Count | None = Field(None, description="The newer name of `max_tokens`.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    n: Annotated[Literal[1] | None, _only(1, "this server gives one answer per request")] = Field(
        None, description="1."
    )
    logprobs: Annotated[Literal[False] | None, _only(False, _NO_LOGPROBS)] = Field(None, description="Not given.")
    top_logprobs: Annotated[Literal[0] | None, _only(0, _NO_LOGPROBS)] = Field(None, description="Not given.")
    presence_penalty: Annotated[Literal[0] | None, _only(0, _NO_PENALTY)] = Field(None, description="0.")
    frequency_penalty: Annotated[Literal[0] | None, _only(0, _NO_PENALTY)] = Field(None, description="0.")
    response_format: Annotated[
        dict[Literal["type"], Literal["text"]] | None, _only({"type": "text"}, "this server answers in plain text only")
    ] = Field(None, description="Plain text.")

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest("Give max_completion_tokens or max_tokens, not both.", param="max_completion_tokens")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream.", param="stream_options")
        check_turns([(_role(turn), len(turn.text)) for turn in self.messages])
        places = [index for index, turn in enumerate(self.messages) for _ in turn.videos]
        if len(places) != 1:
            raise InvalidRequest("The messages must have exactly one video among their parts.", param="messages")
        if self.messages[places[0]].role != "user":
            raise InvalidRequest("The video must be in a user turn.", param=f"messages.{places[0]}.role")
        if not self.messages[-1].text:
            raise InvalidRequest("The last message must say something.", param=f"messages.{len(self.messages) - 1}")
        return self

    @property
    def turns(self) -> tuple[ChatMessage, ...]:
        """The conversation for the engine; a turn's video comes before its text."""
        return tuple(ChatMessage(role=_role(t), text=t.text, num_videos=len(t.videos)) for t in self.messages)

    @property
    def source(self) -> Source:
        """Where the video is."""
        return next(part.source for turn in self.messages for part in turn.videos)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self, **changed: Any) -> Options:
        """See `Options.options`."""
        return super().options(max_tokens=self.max_completion_tokens or self.max_tokens, **changed)


def _role(turn: ChatTurn) -> str:
    return "system" if turn.role == "developer" else turn.role


def _by_url(url: str) -> Source:
    return Source(data_url=url) if url[:5].lower() == "data:" else Source(url=url)
