"""What a stream of OpenAI's `choices` may tell at its end: the usage, in chat and of a text alike."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vidspec_service.api.schemas.chat_parts import only
from vidspec_service.api.schemas.fields import Strict
from vidspec_service.api.schemas.video_chat import ChatRequest
from vidspec_service.errors import InvalidRequest


class StreamOptions(Strict):
    """What a stream tells besides its text."""

    include_usage: bool = Field(False, description="One more chunk at the end, with the usage.")
    include_obfuscation: bool | None = Field(None, description="Taken; chunks are not padded here.")
    continuous_usage_stats: Annotated[Literal[False] | None, only(False, "the usage is told once, at the end")] = Field(
        None, description="false."
    )


class StreamedUsage(ChatRequest):
    """A body whose answer may be streamed with the usage."""

    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")

    @model_validator(mode="after")
    def _is_streamed(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream.", param="stream_options")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with it."""
        return self.stream_options is not None and self.stream_options.include_usage
