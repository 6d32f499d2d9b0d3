"""Requests as they come over the wire: every field, its limits, and what may not stand beside what.

A field is either honoured or refused; there is no third way. A valid body becomes a GenerationRequest here, once.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vidspec_models.request import Compression, GenerationRequest, SamplingParams, SpeculationMode, Turn
from vidspec_service.api.schemas.answers import VIDEO_CHAT, Dialect
from vidspec_service.api.schemas.fields import (
    DATA_URL,
    MAX_TURNS,
    Count,
    FormFile,
    Id,
    NotNegative,
    Positive,
    Source,
    Stops,
    Strict,
    Text,
    Url,
    check_turns,
)
from vidspec_service.api.schemas.sampling import SamplingFields
from vidspec_service.api.schemas.structured_output import StructuredOutput
from vidspec_service.decoding.clip import FrameRequest, check_agreement
from vidspec_service.errors import InvalidRequest


class ChatRequest(SamplingFields, StructuredOutput):
    """How to answer and which frames to look at: the same in every route that answers."""

    stream: bool | None = Field(False, description="Answer with server-sent events as tokens are committed.")
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
        if self.ignore_eos and self.grammar is not None:
            raise InvalidRequest("An answer of a given form ends where the grammar does.", param="ignore_eos")
        check_agreement(self.frames)
        return self

    @property
    @abstractmethod
    def turns(self) -> tuple[Turn, ...]:
        """The conversation."""

    @property
    @abstractmethod
    def source(self) -> Source | None:
        """Where the video is; None: it is the form's file, which is here already."""

    @property
    def dialect(self) -> Dialect:
        """How to answer."""
        return VIDEO_CHAT

    def check_model(self, served: str) -> None:
        """Raises ModelNotFound if the client asks for another model than the one that is `served`."""

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

    def generation_request(
        self, request_id: str, default_speculation: SpeculationMode, default_compression: Compression
    ) -> GenerationRequest:
        """What the engine is asked, but for the video. Null is the same as not given."""
        request = GenerationRequest(
            request_id=request_id,
            turns=self.turns,
            sampling=SamplingParams(
                temperature=self.temperature or 0.0,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k or 0,
                seed=secrets.randbits(64) if self.seed is None else self.seed,
            ),
            stop=tuple(self.stop or ()),
            grammar=None if self.grammar is None else self.grammar.text,
            speculation=self.speculation or default_speculation,
            compression=self.compression or default_compression,
        )
        return self.with_law(request)


class Message(Strict):
    """One turn of the conversation. The video belongs to the first user turn."""

    role: Literal["system", "user", "assistant"] = Field(description="Who speaks.")
    content: Text = Field(description="What is said.")


class VideoChat(ChatRequest):
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
        if sum(given is not None for given in (self.video, self.video_id, self.video_url)) != 1:
            raise InvalidRequest("Give exactly one of video, video_id and video_url.", param="video")
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Give exactly one of prompt and messages.", param="prompt")
        if self.messages is not None:
            check_turns([(message.role, len(message.content)) for message in self.messages])
        return self

    @property
    def turns(self) -> tuple[Turn, ...]:
        """See ChatRequest."""
        if self.messages is None:
            return (Turn(role="user", text=self.prompt or "", num_videos=1),)
        first_user = next(index for index, message in enumerate(self.messages) if message.role == "user")
        return tuple(
            Turn(role=message.role, text=message.content, num_videos=int(index == first_user))
            for index, message in enumerate(self.messages)
        )

    @property
    def source(self) -> Source | None:
        """See ChatRequest."""
        if isinstance(self.video, Path):
            return None
        return Source(data_url=self.video, video_id=self.video_id, url=self.video_url)


class VideoChatJson(VideoChat):
    """The JSON body."""

    video: str | None = Field(None, description=DATA_URL)


class VideoChatForm(VideoChat):
    """The multipart form."""

    video: FormFile | None = Field(None, description="The video file.")
