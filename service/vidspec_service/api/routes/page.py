"""GET /: a page to ask, watch and compare with, from files in the wheel; and the sample clips that it offers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from vidspec_service.api.limits.admission import caller_of, sharer_of
from vidspec_service.api.page.files import PageFile
from vidspec_service.api.page.samples import MOST_SEED, SampleClips
from vidspec_service.api.services import Services

# Nothing comes from elsewhere or from inside the page; clips and pictures are made in it, as blobs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # a file of an older version must not meet newer ones
}


def page_router(services: Services, files: Mapping[str, PageFile]) -> APIRouter:
    """The page's `files`, by their paths, and the clips."""
    router = APIRouter(include_in_schema=False)
    clips = SampleClips()

    async def served(file: PageFile, request: Request) -> Response:
        headers = {**_HEADERS, "etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    for path, file in files.items():
        router.add_route(path, partial(served, file))

    @router.get("/page/samples/{seed}")
    async def sample(request: Request, seed: Annotated[int, Path(ge=0, le=MOST_SEED)]) -> Response:
        """A clip as the bundled models know them; the header `x-caption` tells what it shows."""
        with services.admission.permit(caller_of(request), sharer_of(request)) as permit:
            clip = await services.deadline(permit, request.receive).run(clips.clip(seed))
        return Response(clip.content, media_type="video/mp4", headers={"x-caption": clip.caption})

    return router
