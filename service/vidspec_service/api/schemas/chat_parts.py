"""The parts of a turn in the OpenAI dialect: text, videos and images, wherever they are.

OpenAI's own schema knows images and no video. `video_url` parts are vLLM's and SGLang's, `input_video` is llama.cpp's,
and a `file` part is how OpenAI's own names an upload, or has the file in it. To the models an
image is a video of one frame.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from vidspec_service.api.schemas.fields import FrameTimes, Id, Said, Source, Strict, exactly_one_of

FileName = Annotated[str, StringConstraints(max_length=512)]


class SaidPart(Strict):
    """Something said."""

    text: Said


class TextPart(SaidPart):
    """Text in a message."""

    type: Literal["text"]


class VideoUrl(FrameTimes):
    """Where a video is. Own frames are `data:video/jpeg;base64,F1,F2,...`, as vLLM takes them."""

    url: str = Field(min_length=1, description="`data:video/...;base64,...`, or https if the operator allows the host.")


class VideoUrlPart(Strict):
    """A video, as vLLM and SGLang take it."""

    type: Literal["video_url"]
    video_url: VideoUrl

    @property
    def source(self) -> Source:
        """Where the video is."""
        return replace(by_url(self.video_url.url), times=self.video_url.times)


class InputVideo(Strict):
    """A video's bytes, or where it is."""

    data: str | None = Field(None, min_length=1, description="Base64, bare or as a data URL.")
    url: str | None = Field(None, min_length=1, description="As in a video_url part.")

    _one_of_them = exactly_one_of("data", "url", param="messages", where=" in input_video")


class InputVideoPart(Strict):
    """A video, as llama.cpp takes it."""

    type: Literal["input_video"]
    input_video: InputVideo

    @property
    def source(self) -> Source:
        """Where the video is."""
        data = self.input_video.data
        return by_url(self.input_video.url or "") if data is None else by_data(data)


class ImageUrl(Strict):
    """Where an image is."""

    url: str = Field(min_length=1, description="`data:image/...;base64,...`, or https if the operator allows the host.")
    detail: Literal["low", "high", "auto"] | None = Field(None, description="Taken; images have one size here.")


class ImageUrlPart(Strict):
    """An image: PNG, JPEG or WebP."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def source(self) -> Source:
        """Where the image is."""
        return replace(by_url(self.image_url.url), is_still=True)


class FileRef(Strict):
    """An upload's id, or a file's bytes."""

    file_id: Id | None = Field(None, description="Of a video that was uploaded to /v1/videos.")
    file_data: str | None = Field(
        None, min_length=1, description="`data:video/...;base64,...` or `data:image/...`; bare base64 is a video's."
    )
    filename: FileName | None = Field(None, description="Taken; what a file is its bytes say.")

    _one_of_them = exactly_one_of("file_id", "file_data", param="messages", where=" in a file")

    @property
    def source(self) -> Source:
        """Where the video is."""
        if self.file_data is None:
            return Source(video_id=self.file_id)
        return replace(by_data(self.file_data), is_still=self.file_data[:11].lower() == "data:image/")


class FilePart(Strict):
    """A video as a file: one that was uploaded to /v1/videos, or in the body."""

    type: Literal["file"]
    file: FileRef

    @property
    def source(self) -> Source:
        """Where the video is."""
        return self.file.source


VideoPart = VideoUrlPart | InputVideoPart | ImageUrlPart | FilePart


def by_url(url: str) -> Source:
    """A data URL, or an address."""
    return Source(data_url=url) if url[:5].lower() == "data:" else Source(url=url)


def by_data(data: str) -> Source:
    """Base64 of a video, bare or as a data URL."""
    return Source(data_url=data if data[:5].lower() == "data:" else f"data:video/mp4;base64,{data}")
