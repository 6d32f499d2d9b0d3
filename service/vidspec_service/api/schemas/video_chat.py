"""Requests as they come over the wire: every field, its limits, and which fields exclude each other.

A field is either honoured or refused. A valid body becomes a GenerationRequest here, and nowhere else.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, StringConstraints, model_validator

from vidspec_models.request import (
    DEFAULT_TEMPLATE,
    VIDEO,
    ChatTemplate,
    Compression,
    GenerationRequest,
    Include,
    Preservation,
    SpeculationMode,
    Turn,
)
from vidspec_service.api.schemas.chat_messages import check_conversation
from vidspec_service.api.schemas.dialects import VIDEO_CHAT, Dialect
from vidspec_service.api.schemas.fields import (
    DATA_URL,
    MAX_TURNS,
    Count,
    FormFile,
    Fps,
    FrameTimes,
    Id,
    MessageText,
    NonBlankText,
    NotNegative,
    Positive,
    Stops,
    Strict,
    Url,
    VideoSource,
    exactly_one_of,
)
from vidspec_service.api.schemas.sampling import SamplingFields
from vidspec_service.api.schemas.structured_output import StructuredOutput
from vidspec_service.decoding.clip import FrameRequest
from vidspec_service.engine.frontend.interface import EngineInfo
from vidspec_service.errors import InvalidRequest
from vidspec_service.settings import Settings

MAX_N = 8
MAX_VIDEOS = 1000  # in a body; the operator's setting for a request is checked later
_VIDEO_ID = "Id of a video that was uploaded to /v1/videos."
_VIDEO_URL = "https address of a video, if the operator allows its host."


class ChatRequest(SamplingFields, StructuredOutput):
    """How to answer and which frames to look at: the same in every route that answers."""

    stream: bool | None = Field(False, description="Answer with server-sent events as tokens are committed.")
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(
        1, description="Number of answers to the prompt, 1 to 8; answer i, counted from 0, uses the seed `seed` + i."
    )
    stop: Stops | None = Field(
        None,
        description="Up to 4 strings that end the answer and are not in it; repeat the part in a form.",
    )
    fps: Fps | None = Field(None, description="Frames per second of video; not with `num_frames`.")
    num_frames: Count | None = Field(None, description="Number of evenly sampled frames; not with `fps`.")
    max_frames: Count | None = Field(None, description="Maximum number of sampled frames.")
    start_s: NotNegative | None = Field(None, description="Sample from this second of the video on.")
    end_s: Positive | None = Field(None, description="Sample up to this second, exclusive.")
    speculation: SpeculationMode | None = Field(
        None, description="How draft and target share the work. It changes the speed, never the text."
    )
    compression: Compression | None = Field(
        None, description="Lossy compression of the video on the target; all but `none` may change the text."
    )
    compression_ratio: Annotated[float, Field(ge=0.01, le=1)] | None = Field(
        None, description="The share of the video's tokens that compression keeps."
    )
    preservation: Preservation | None = Field(
        None, description="Which of the video's tokens the draft sees. It changes the speed, never the text."
    )
    prune_ratio: Annotated[float, Field(ge=0, le=0.99)] | None = Field(
        None, description="The share of the video's tokens that the draft does not see."
    )
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = Field(
        None, description="Reuse what was computed for requests with the same cache_salt only, as for a user of yours."
    )

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        self.check_end()
        if self.fps is not None and self.num_frames is not None:
            raise InvalidRequest("Give fps or num_frames, not both.", param="fps")
        if self.end_s is not None and self.end_s <= (self.start_s or 0.0):
            raise InvalidRequest("end_s must be greater than start_s.", param="end_s")
        return self

    def check_end(self) -> None:
        """Raises InvalidRequest if both `ignore_eos` and a grammar say where the answer ends."""
        if self.ignore_eos and self.grammar is not None:
            raise InvalidRequest(
                "ignore_eos cannot be used with structured output: the answer ends where its grammar ends.",
                param="ignore_eos",
            )

    @property
    @abstractmethod
    def prompts(self) -> Sequence[tuple[Turn, ...]]:
        """The conversations to answer, mostly one."""

    @property
    @abstractmethod
    def sources(self) -> tuple[VideoSource, ...]:
        """Where the conversation's videos and images are, in their order."""

    @property
    def dialect(self) -> Dialect:
        """How to answer."""
        return VIDEO_CHAT

    @property
    def included(self) -> frozenset[Include]:
        """What to report besides the answer."""
        return frozenset()

    @property
    def template(self) -> ChatTemplate | None:
        """Arguments of the checkpoint's chat template; None: no template, the text itself is the prompt."""
        return DEFAULT_TEMPLATE

    def for_engine(self, info: EngineInfo) -> Self:
        """A copy for this engine: sampling fields that the client did not give get the checkpoint's values.

        Raises ModelNotFound for a model that is not served, InvalidRequest for what the engine cannot do.
        """
        most = info.default_max_tokens
        if self.most_tokens is None and (self.min_tokens or 0) > most:
            raise InvalidRequest(
                f"Without max_tokens an answer has at most {most} tokens (VIDSPEC_DEFAULT_MAX_TOKENS); "
                "min_tokens must not be more.",
                param="min_tokens",
            )
        unsaid = {name: value for name, value in info.default_sampling.items() if not self._is_given(name)}
        return self.model_copy(update=unsaid)

    @property
    def frames(self) -> FrameRequest:
        """Which frames the client wants."""
        return FrameRequest(
            fps=self.fps,
            num_frames=self.num_frames,
            max_frames=self.max_frames,
            start_s=self.start_s,
            end_s=self.end_s,
        )

    def generation_requests(self, name: str, settings: Settings) -> list[GenerationRequest]:
        """The requests to the engine, one for each prompt, without its videos. Null is the same as not given.

        Answers are counted over all prompts: each uses the seed of the first plus its number.
        """
        compression = self.compression or settings.compression
        if compression is Compression.NONE and self.compression_ratio is not None:
            raise InvalidRequest(
                "compression_ratio needs a compression; none keeps every token.", param="compression_ratio"
            )
        n, sampling = self.n or 1, self.sampling_params()
        request = GenerationRequest(
            request_id=name,
            turns=(),
            template=self.template,
            sampling=sampling,
            max_tokens=self.most_tokens,
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.num_logprobs,
            grammar=None if self.grammar is None else self.grammar.text,
            speculation=self.speculation or settings.speculation,
            compression=compression,
            compression_ratio=self.compression_ratio or settings.compression_ratio,
            preservation=self.preservation,
            prune_ratio=self.prune_ratio,
            cache_salt=self.cache_salt,
            include=self.included,
            n=n,
        )
        return [
            replace(
                request,
                request_id=f"{name}-p{index}" if index else name,
                turns=turns,
                sampling=replace(sampling, seed=(sampling.seed + index * n) % 2**64),
            )
            for index, turns in enumerate(self.prompts)
        ]

    def _is_given(self, name: str) -> bool:
        return name in self.model_fields_set and getattr(self, name) is not None


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
            said = [Turn(role=message.role, parts=(message.content,)) for message in self.messages]
            check_conversation([(f"messages.{index}", turn) for index, turn in enumerate(said)])
        return self

    @property
    def included(self) -> frozenset[Include]:
        """See ChatRequest."""
        return frozenset(self.include or ())

    @property
    def prompts(self) -> list[tuple[Turn, ...]]:
        """See ChatRequest. The videos come before the first thing that the user says."""
        shown = (VIDEO,) * len(self.sources)
        if self.messages is None:
            return [(Turn(role="user", parts=(*shown, self.prompt or "")),)]
        first_user = next(index for index, message in enumerate(self.messages) if message.role == "user")
        turns = (
            Turn(role=message.role, parts=(*(shown if index == first_user else ()), message.content))
            for index, message in enumerate(self.messages)
        )
        return [tuple(turns)]


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
        """See ChatRequest."""
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
        """See ChatRequest."""
        given = {
            "video": (VideoSource(file=file) for file in self.video),
            "video_id": (VideoSource(video_id=video_id) for video_id in self.video_id),
            "video_url": (VideoSource(url=url) for url in self.video_url),
        }
        return tuple(next(given[name]) for name in self._parts if name in given)
