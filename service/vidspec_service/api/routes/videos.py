"""/v1/videos: upload once, ask many times; list, look at and delete what is kept. Everybody sees their own only."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Annotated

from fastapi import APIRouter, Path, Request

from vidspec_service.api import documents
from vidspec_service.api.access import caller_of
from vidspec_service.api.answering import guard_of, received
from vidspec_service.api.answers import Video, VideoDeleted, VideoList
from vidspec_service.api.body import BodyReader
from vidspec_service.api.clips import ClipKey
from vidspec_service.api.deps import Services
from vidspec_service.api.intake import Intake
from vidspec_service.api.schemas import VideoUpload, VideoUploadForm, VideoUploadJson
from vidspec_service.decoding.selection import Clip, FrameRequest

VideoId = Annotated[str, Path(max_length=64, description="As the upload was answered.")]


def videos_router(services: Services) -> APIRouter:
    """The routes, on their collaborators."""
    router = APIRouter(tags=["videos"])

    @router.post(
        "/v1/videos",
        summary="Upload a video to ask about",
        responses=documents.problems(*documents.UPLOAD_STATUSES),
        openapi_extra=documents.VIDEO_UPLOAD_BODY,
    )
    async def upload(request: Request) -> Video:
        """Keep a video for later questions, which name it by its id. It is decoded now, so a bad one is refused now."""
        caller = caller_of(request)
        with ExitStack() as held:
            place = held.enter_context(services.admission.place(caller))
            default = services.default_num_frames  # raises EngineDead before a byte is uploaded
            intake = held.enter_context(Intake(services, caller, place))
            fields = await received(request, services, intake, _read)
            guard = guard_of(request, services)
            await guard.run(intake.take(fields.source))
            clip = await guard.run(_decoded(services, intake, default))
            file = intake.file
            video = services.videos.keep(caller, file.path, _facts(file.content_id, file.num_bytes, clip))
            intake.hand_over()
            return video

    @router.get("/v1/videos", summary="List your videos", responses=documents.problems(401))
    async def listed(request: Request) -> VideoList:
        """The videos that are kept for you, most recently used first."""
        return VideoList(data=services.videos.all_facts(caller_of(request)))

    @router.get("/v1/videos/{video_id}", summary="Look at a video", responses=documents.problems(400, 401, 404))
    async def one(request: Request, video_id: VideoId) -> Video:
        """Facts about a video that is kept for you."""
        return services.videos.facts(caller_of(request), video_id)

    @router.delete("/v1/videos/{video_id}", summary="Delete a video", responses=documents.problems(400, 401, 404))
    async def deleted(request: Request, video_id: VideoId) -> VideoDeleted:
        """Delete a video and its frames. Answers that are under way are finished."""
        services.videos.drop(caller_of(request), video_id)
        return VideoDeleted(id=video_id)

    return router


async def _read(reader: BodyReader) -> VideoUpload:
    return await reader.form_or_json(VideoUploadForm, VideoUploadJson)


async def _decoded(services: Services, intake: Intake, default_num_frames: int) -> Clip:
    """The frames that the first question will most likely be about."""
    key = ClipKey(intake.caller, intake.file.content_id, FrameRequest())
    await services.turns.take(intake.caller)
    try:
        return await services.clips.clip(key, intake.file, default_num_frames)
    finally:
        services.turns.give_back()


def _facts(content_id: str, num_bytes: int, clip: Clip) -> Video:
    now = int(time.time())
    return Video(
        id=content_id,
        bytes=num_bytes,
        created_at=now,
        expires_at=now,  # whoever keeps it knows better
        duration_s=round(clip.video.duration_s, 6),
        width=clip.width,
        height=clip.height,
        fps=round(clip.video.source_fps, 6),
        num_source_frames=clip.video.source_num_frames,
        codec=clip.codec,
        warnings=list(clip.warnings),
    )
