"""Bodies and answers of /v1/videos."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from vidspec_service.api.schemas.fields import (
    DATA_URL,
    FormFile,
    Number,
    Strict,
    Url,
    VideoFile,
    VideoSource,
    exactly_one_of,
)


class VideoUpload(Strict):
    """A video to keep, whatever the body's format."""

    video: FormFile | str | None = None
    video_url: Url | None = Field(None, description="https address of a video, if the operator allows its host.")

    _one_video = exactly_one_of("video", "video_url", param="video")

    @property
    def source(self) -> VideoSource:
        """Where the video is."""
        if isinstance(self.video, VideoFile):
            return VideoSource(file=self.video)
        return VideoSource(data_url=self.video, url=self.video_url)


class VideoUploadJson(VideoUpload):
    """The JSON body."""

    video: str | None = Field(None, description=DATA_URL)


class VideoUploadForm(VideoUpload):
    """The multipart form."""

    video: FormFile | None = Field(None, description="The video file.")


class Video(BaseModel):
    """A video that is kept on the server."""

    id: str = Field(description="Hash of the file's content: the same bytes give the same id.")
    object: Literal["video"] = "video"
    bytes: int
    created_at: int = Field(description="Unix time, in seconds.")
    expires_at: int = Field(description="Unix time at which it will be deleted; each question about it postpones this.")
    duration_s: Number
    width: int = Field(description="Pixels, after rotation.")
    height: int
    fps: Number = Field(description="Average frame rate.")
    num_source_frames: int
    codec: str
    warnings: list[str]


class VideoList(BaseModel):
    """A page of the caller's videos, most recently used first."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None = Field(description="Send it as `after` to get the next page.")
    has_more: bool


class VideoDeleted(BaseModel):
    """The video was deleted."""

    id: str
    object: Literal["video"] = "video"
    deleted: Literal[True] = True
