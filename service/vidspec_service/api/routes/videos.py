"""/v1/videos: upload once, ask many times; list, look at and delete what is kept. Callers see only their own."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from vidspec_service.api.generate.generation import limit_to_model
from vidspec_service.api.limits.admission import caller_of
from vidspec_service.api.openapi import documents
from vidspec_service.api.schemas.fields import VideoFile
from vidspec_service.api.schemas.videos import (
    Video,
    VideoDeleted,
    VideoList,
    VideoUpload,
    VideoUploadForm,
    VideoUploadJson,
)
from vidspec_service.api.services import Services
from vidspec_service.api.uploads.upload import Upload
from vidspec_service.decoding.clip import Clip, FrameRequest

MAX_PAGE = 100
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Maximum number of videos in the answer.")]
After = Annotated[str | None, Query(max_length=64, description="`last_id` of the previous page.")]
_OF_KEPT = documents.error_responses(400, 401, 404, 503)
VideoId = Annotated[str, Path(max_length=64, description="The `id` in the answer to the upload.")]


def videos_router(services: Services) -> APIRouter:
    """The routes, on their collaborators."""
    router = APIRouter(tags=["videos"])

    @router.post("/v1/videos", summary="Upload a video to ask about", **documents.VIDEO_UPLOAD)
    async def upload(request: Request) -> Video:
        """Keep a video for later questions, which name its id. It is decoded now, so a bad one is refused at once."""
        with services.permit(request) as permit:
            frames = limit_to_model(services, FrameRequest())  # raises EngineDead before a byte is uploaded
            upload = Upload(request, permit, services.upload_dir, services.settings)
            with closing(upload):
                body: VideoUpload = await upload.fields(form=VideoUploadForm, json=VideoUploadJson)
                deadline = services.deadline(permit, request.receive)
                file = await deadline.run(upload.video(body.source, services.videos, services.fetcher))
                clip = await deadline.run(_decoded(services, permit.caller, file, frames))
                return await deadline.run(_kept(services, permit.caller, upload, file, _facts(file, clip)))

    @router.get("/v1/videos", summary="List your videos", responses=_OF_KEPT)
    async def listed(request: Request, limit: PageSize = MAX_PAGE, after: After = None) -> VideoList:
        """The videos that are kept for you, most recently used first, page by page."""
        videos, has_more = await services.videos.page(caller_of(request), after, limit)
        ids = [video.id for video in videos]
        return VideoList(
            data=videos, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=has_more
        )

    @router.get("/v1/videos/{video_id}", summary="Get facts about a video", responses=_OF_KEPT)
    async def one(request: Request, video_id: VideoId) -> Video:
        """Facts about a video that is kept for you."""
        return await services.videos.facts(caller_of(request), video_id)

    @router.delete("/v1/videos/{video_id}", summary="Delete a video", responses=_OF_KEPT)
    async def deleted(request: Request, video_id: VideoId) -> VideoDeleted:
        """Delete a video and its frames. Answers in progress are finished."""
        await services.videos.delete(caller_of(request), video_id)
        return VideoDeleted(id=video_id)

    return router


async def _decoded(services: Services, caller: str, file: VideoFile, frames: FrameRequest) -> Clip:
    """The frames that the first question will most likely be about."""
    await services.queue.acquire(caller)
    try:
        return await services.clips.get(caller, file, frames)
    finally:
        services.queue.release(caller)


async def _kept(services: Services, caller: str, upload: Upload, file: VideoFile, facts: Video) -> Video:
    """Keep and hand over, with no await in between: a request that ends must not delete a file that is taken over."""
    video = await services.videos.keep(caller, file, facts)
    upload.hand_over()
    return video


def _facts(file: VideoFile, clip: Clip) -> Video:
    now = int(time.time())
    return Video(
        id=file.content_id,
        bytes=file.num_bytes,
        created_at=now,
        expires_at=now,  # replaced by whoever keeps the video
        duration_s=clip.video.duration_s,
        width=clip.width,
        height=clip.height,
        fps=clip.source_fps,
        num_source_frames=clip.source_num_frames,
        codec=clip.codec,
        warnings=list(clip.warnings),
    )
