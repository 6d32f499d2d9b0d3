"""Types and limits of the fields that several requests, or answers, have; and where the videos of a request are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    InstanceOf,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)

from vidspec_service.decoding.clip import FrameSequence
from vidspec_service.errors import InvalidRequest, RequestError

MAX_TEXT = 200_000  # characters of one request; any model's context is shorter
MAX_TURNS = 256
MAX_URL = 2048  # characters
MAX_STOPS = 4
MAX_STOP = 256
MAX_TOP_LOGPROBS = 20
_MIN_STEP_S = 0.001
_MAX_TIMES = 20_000  # more than any server's max_frames
_MOST = 1e9  # seconds: no video has more
_VIDEO_FIELDS = ("video", "video_id", "video_url", "timestamps_s")
DATA_URL = "A base64 data URL, `data:video/mp4;base64,...`."


@dataclass(frozen=True, slots=True)
class VideoFile:
    """A video on our disk, under a name of ours."""

    path: Path
    num_bytes: int
    content_id: str  # names the bytes: equal content, equal id
    is_still: bool = False  # an image
    sequence: FrameSequence | None = None  # a client's own frames, one image after the other


def content_id(sha256: str) -> str:
    """The id of bytes, by their digest in hex."""
    return f"video-{sha256[:32]}"


@contextmanager
def about_video(index: int, num_videos: int) -> Iterator[None]:
    """Makes errors name the video they are about, counted from 0; with a single video they stay as they are."""
    try:
        yield
    except RequestError as error:
        if num_videos == 1:
            raise
        name = f"videos.{index}"
        param = name if error.param in (None, *_VIDEO_FIELDS) else error.param
        raise type(error)(f"{name}: {error.message}", param=param) from error


def as_list(value: object) -> object:
    """A list of a single string that stands for it."""
    return [value] if isinstance(value, str) else value


def _address(value: object) -> object:
    if isinstance(value, str) and value[:5].lower() == "data:":
        raise ValueError("it is an https address; a data: URL goes into video")
    return value


String = TypeVar("String")
Other = TypeVar("Other")
# For a field that is a string or something else: errors are then about the variant that the client sent.
StringOr = Annotated[
    Annotated[String, Tag("a string")] | Annotated[Other, Tag("another")],
    Discriminator(lambda value: "a string" if isinstance(value, str) else "another"),
]


def is_none(value: object) -> bool:
    """For `exclude_if` of a field that an answer has only if the request asks for it."""
    return value is None


Number = Annotated[float, AfterValidator(partial(round, ndigits=6))]  # for seconds: microseconds; more is noise
NonBlankText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT, pattern=r"\S")]
MessageText = Annotated[str, StringConstraints(max_length=MAX_TEXT)]  # `check_conversation` says who may leave it empty
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP)]
StopList = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
Stops = Annotated[StopList, BeforeValidator(as_list, json_schema_input_type=StopString | StopList)]
Id = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Url = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL), BeforeValidator(_address)]
Positive = Annotated[float, Field(gt=0, le=_MOST)]
NotNegative = Annotated[float, Field(ge=0, le=_MOST)]
Fps = Annotated[float, Field(gt=0, le=1000)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]
TokenId = CountOrZero
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
# A file part of a form. The form reader writes the file to disk before the form is validated.
FormFile = Annotated[InstanceOf[VideoFile], WithJsonSchema({"type": "string", "format": "binary"})]


class Strict(BaseModel):
    """Unknown fields are refused, and so are NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    repeated: ClassVar[frozenset[str]] = frozenset()  # fields that a form may have several parts of


class ModelName(Strict):
    """Base of bodies that may name the model they are for."""

    model: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="A name of the served model; another name is a 404."
    )


class FrameTimes(Strict):
    """When the frames of a `data:video/jpeg` URL are shown; without `fps` and `timestamps_s`, one frame per second."""

    fps: Fps | None = Field(None, description="For `data:video/jpeg` frames: how many are shown per second.")
    timestamps_s: Annotated[list[NotNegative], Field(min_length=1, max_length=_MAX_TIMES)] | None = Field(
        None, description="For `data:video/jpeg` frames: when each is shown, in seconds, increasing by 1 ms or more."
    )

    @model_validator(mode="after")
    def _times_agree(self) -> Self:
        if self.fps is not None and self.timestamps_s is not None:
            raise InvalidRequest("Give fps or timestamps_s of frames, not both.", param="timestamps_s")
        for earlier, later in pairwise(self.timestamps_s or ()):
            if later - earlier < _MIN_STEP_S - 1e-9:
                raise InvalidRequest("timestamps_s must increase by 0.001 or more.", param="timestamps_s")
        return self

    @property
    def times(self) -> FrameTimes | None:
        """None if the client gave neither field."""
        return None if self.fps is None and self.timestamps_s is None else self


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSource:
    """Where one of a request's videos or images is."""

    file: VideoFile | None = None  # a file part of the form, already on disk
    data_url: str | None = None
    video_id: str | None = None
    url: str | None = None
    is_still: bool = False
    times: FrameTimes | None = None  # when the frames of a data URL are shown; None: not stated


def exactly_one_of(*names: str, param: str | None = None, where: str = "") -> Any:
    """A model validator that requires exactly one of the fields `names`; `where` is the end of its error message.

    `param` is the field that the error names; None: the place of the model in the body.
    """
    refused = f"Give exactly one of {', '.join(names[:-1])} and {names[-1]}{where}"

    def check(body: Strict) -> Strict:
        if sum(getattr(body, name) is not None for name in names) == 1:
            return body
        if param is None:
            raise ValueError(refused)
        raise InvalidRequest(f"{refused}.", param=param)

    return model_validator(mode="after")(check)
