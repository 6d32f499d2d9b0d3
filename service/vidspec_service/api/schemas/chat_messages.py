"""The turns of a conversation in OpenAI's format: their parts, tool calls and tool results.

OpenAI's own schema has images but no videos. `video_url` parts are vLLM's and SGLang's, `input_video` is llama.cpp's
and OpenRouter's; a `file` part is OpenAI's own and names an upload or contains the file. To the models an image is a
video of one frame.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from vidspec_models.request import VIDEO, ToolCall, Turn
from vidspec_service.api.schemas.client_fields import Label, MediaFields, MessageFields, PartFields, inert
from vidspec_service.api.schemas.fields import (
    MAX_TEXT,
    FrameTimes,
    Id,
    MessageText,
    Strict,
    StringOr,
    VideoSource,
    exactly_one_of,
)
from vidspec_service.api.schemas.tool_use import MAX_TOOLS, ToolName
from vidspec_service.errors import InvalidRequest

MAX_PARTS = 64

PlacedTurn = tuple[str, Turn]  # its place in the body, such as `messages.0`; the turn for the engine
CallId = Annotated[str, StringConstraints(pattern=r"^[\w.:|-]{1,128}$")]


class BaseTextPart(PartFields):
    """Text."""

    text: MessageText


class TextPart(BaseTextPart):
    """Text in a message."""

    type: Literal["text"]
    # OpenAI's Agents SDK for JavaScript repeats the other fields of an answer's message in its text part
    role: Literal["assistant"] | None = inert("the message has it")
    refusal: None = inert("the message has it")
    reasoning: MessageText | None = inert("the message has it")
    reasoning_content: MessageText | None = inert("the message has it")
    tool_calls: Annotated[list[Any], Field(max_length=MAX_TOOLS)] | None = inert("the message has it")


class VideoUrl(FrameTimes):
    """Where a video is. A client's own frames are `data:video/jpeg;base64,F1,F2,...`, as in vLLM."""

    url: str = Field(min_length=1, description="`data:video/...;base64,...`, or https if the operator allows the host.")
    detail: Label | None = inert("num_frames and fps choose the frames")


class VideoUrlPart(MediaFields):
    """A video, in the format of vLLM and SGLang."""

    type: Literal["video_url"]
    video_url: VideoUrl

    @property
    def source(self) -> VideoSource:
        """Where the video is."""
        return replace(by_url(self.video_url.url), times=self.video_url.times)


class InputVideo(Strict):
    """A video's bytes, or where it is."""

    data: str | None = Field(None, min_length=1, description="Base64, with or without a data URL's prefix.")
    url: str | None = Field(None, min_length=1, description="As in a video_url part.")

    _one_of_them = exactly_one_of("data", "url", where=" in input_video")

    @property
    def source(self) -> VideoSource:
        """Where the video is."""
        return by_url(self.url or "") if self.data is None else by_data(self.data)


class InputVideoPart(PartFields):
    """A video, in the format of llama.cpp or of OpenRouter."""

    type: Literal["input_video"]
    input_video: InputVideo | None = Field(None, description="As in llama.cpp.")
    video_url: str | None = Field(None, min_length=1, description="The url itself, as in OpenRouter's Responses API.")

    _one_of_them = exactly_one_of("input_video", "video_url")

    @property
    def source(self) -> VideoSource:
        """Where the video is."""
        return by_url(self.video_url or "") if self.input_video is None else self.input_video.source


class ImageUrl(Strict):
    """Where an image is."""

    url: str = Field(min_length=1, description="`data:image/...;base64,...`, or https if the operator allows the host.")
    detail: Label | None = inert("there is one image size")


class ImageUrlPart(MediaFields):
    """An image: PNG, JPEG or WebP."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def source(self) -> VideoSource:
        """Where the image is."""
        return replace(by_url(self.image_url.url), is_still=True)


class FileRef(Strict):
    """An upload's id, or a file's bytes."""

    file_id: Id | None = Field(None, description="Id of a video that was uploaded to /v1/videos.")
    file_data: str | None = Field(
        None,
        min_length=1,
        description="`data:video/...;base64,...` or `data:image/...`; base64 without a prefix is a video.",
    )
    filename: Label | None = inert("the format is detected from the bytes")

    _one_of_them = exactly_one_of("file_id", "file_data", where=" in a file")

    @property
    def source(self) -> VideoSource:
        """Where the video is."""
        if self.file_data is None:
            return VideoSource(video_id=self.file_id)
        return replace(by_data(self.file_data), is_still=self.file_data[:11].lower() == "data:image/")


class FilePart(PartFields):
    """A video as a file: one that was uploaded to /v1/videos, or in the body."""

    type: Literal["file"]
    file: FileRef

    @property
    def source(self) -> VideoSource:
        """Where the video is."""
        return self.file.source


def by_url(url: str) -> VideoSource:
    """The source that a data URL or an address names."""
    return VideoSource(data_url=url) if url[:5].lower() == "data:" else VideoSource(url=url)


def by_data(data: str) -> VideoSource:
    """The source for a video in base64, bare or as a data URL."""
    return VideoSource(data_url=data if data[:5].lower() == "data:" else f"data:video/mp4;base64,{data}")


VideoPart = VideoUrlPart | InputVideoPart | ImageUrlPart | FilePart
Part = Annotated[TextPart | VideoPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS)]
Content = StringOr[MessageText, Parts]


def _json_object(text: str) -> str:
    """The text, if it is a JSON object; `{}` for no text, as in vLLM. Raises ValueError."""
    text = text or "{}"
    try:
        is_object = isinstance(json.loads(text), dict)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:  # frameworks send back what they could not read, for the model to try again
        raise ValueError(f"{error}; if max_tokens or a stop string cut the call, leave it out") from None
    if not is_object:
        raise ValueError("it must be a JSON object as a string")
    return text


Arguments = Annotated[str, StringConstraints(max_length=MAX_TEXT), AfterValidator(_json_object)]


class EarlierFunctionCall(Strict):
    """The function that was called."""

    name: ToolName
    arguments: Arguments = Field(description="A JSON object, as text.")


class EarlierToolCall(Strict):
    """A tool call from an earlier answer."""

    id: CallId
    type: Literal["function"] | None = "function"
    function: EarlierFunctionCall
    index: int | None = inert("some clients send back this field of a stream")


class ChatMessage(MessageFields):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="`developer` means the same as `system`."
    )
    content: Content | None = Field(
        None, description="Text, or a list of parts; in a user turn, parts may be videos and images."
    )
    tool_calls: Annotated[list[EarlierToolCall], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="In an assistant's turn: the tool calls that it made."
    )
    tool_call_id: CallId | None = Field(None, description="In a tool's turn: the id of the call whose result it is.")

    @property
    def videos(self) -> list[VideoPart]:
        """The videos of this turn."""
        return [part for part in self.content or () if not isinstance(part, str | BaseTextPart)]

    @property
    def turn(self) -> Turn:
        """The message as a turn for the engine."""
        return Turn(
            role="system" if self.role == "developer" else self.role,
            parts=parts_of(self.content or []),
            tool_calls=tuple(
                ToolCall(call_id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
            reasoning=self.reasoning or self.reasoning_content or "",
        )


def parts_of(content: str | Sequence[Strict]) -> tuple[str | None, ...]:
    """The parts as in Turn; adjacent text parts are joined by line breaks, empty ones are left out."""
    if isinstance(content, str):
        return (content,) if content else ()
    parts: list[str | None] = []
    for is_said, group in groupby(content, lambda part: isinstance(part, BaseTextPart)):
        alike = list(group)
        said = "\n".join(part.text for part in alike if isinstance(part, BaseTextPart) and part.text)
        parts += ([said] if said else []) if is_said else [VIDEO] * len(alike)
    return tuple(parts)


def placed_turns_of(messages: Sequence[ChatMessage]) -> list[PlacedTurn]:
    """The turns of a body's `messages`, each with its place."""
    return with_one_system([(f"messages.{index}", message.turn) for index, message in enumerate(messages)])


def with_one_system(turns: list[PlacedTurn]) -> list[PlacedTurn]:
    """The turns, with the system messages at the beginning joined into one.

    Clients send several (one per source of instructions), but many chat templates use, or allow, only the first.
    """
    leading = list(takewhile(lambda each: each[1].role == "system" and not each[1].num_videos, turns))
    if len(leading) < 2:
        return turns
    said = "\n\n".join(turn.text for _, turn in leading if turn.text)
    return [(leading[-1][0], Turn(role="system", parts=parts_of(said))), *turns[len(leading) :]]


def check_conversation(turns: Sequence[PlacedTurn], *, is_continued: bool = False) -> None:
    """Checks the order of the roles, and that messages are not empty; raises InvalidRequest."""
    place, last = turns[-1]
    if sum(_length(turn) for _, turn in turns) > MAX_TEXT:
        field = place.partition(".")[0]
        raise InvalidRequest(f"All messages together may have at most {MAX_TEXT} characters.", param=field)
    for later, turn in turns[1:]:
        if turn.role == "system":
            raise InvalidRequest("Only the first message may be a system message.", param=f"{later}.role")
    lasts = ("assistant",) if is_continued else ("user", "tool")
    if last.role not in lasts:
        raise InvalidRequest(f"The last message must have the role {' or '.join(lasts)}.", param=f"{place}.role")
    for each in turns:
        _check_turn(*each)
    if is_continued and not last.text.strip():
        raise InvalidRequest("The last message must have text.", param=place)


def _check_turn(place: str, turn: Turn) -> None:
    """Only a user's message must say something: some frontends send the box for instructions even if it is blank."""
    if turn.num_videos and turn.role != "user":
        raise InvalidRequest("Videos and images must be in user messages.", param=f"{place}.role")
    if (turn.role == "tool") != (turn.tool_call_id is not None):
        raise InvalidRequest(
            "Tool messages need a tool_call_id; other messages must not have one.", param=f"{place}.role"
        )
    if turn.tool_calls and turn.role != "assistant":
        raise InvalidRequest("Only assistant messages may have tool_calls.", param=f"{place}.tool_calls")
    if turn.reasoning and turn.role != "assistant":
        raise InvalidRequest("Only assistant messages may have reasoning.", param=f"{place}.reasoning")
    if turn.role == "user" and not turn.num_videos and not turn.text.strip():
        raise InvalidRequest("A message must not be empty.", param=f"{place}.content")


def _length(turn: Turn) -> int:
    return len(turn.text) + len(turn.reasoning) + sum(len(call.arguments) for call in turn.tool_calls)
