"""GET /: a page to ask, watch and compare with, from files in the wheel; and the sample clips that it offers."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from vidspec_service.api.page.samples import MAX_SEED, SampleClips
from vidspec_service.api.services import Services

# No resource is external or inline; the page makes clips and pictures itself, as blobs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "cache-control": "no-cache",  # a file of an older version must not be used with newer ones
}
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, read once; served without a key, since there is nothing private in it."""

    content: bytes
    media_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """The files by the path under which each is served, with a leading slash: the page itself at `/`."""
    found = {}
    for file in (resources.files("vidspec_service.api.page") / "static").iterdir():
        content = file.read_bytes()
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        media_type = _MEDIA_TYPES["." + file.name.rpartition(".")[2]]
        found[path] = PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


def page_router(services: Services, files: Mapping[str, PageFile]) -> APIRouter:
    """The page's `files`, by their paths, and the clips."""
    router = APIRouter(include_in_schema=False)
    clips = SampleClips()

    def serving(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            headers = {**_HEADERS, "etag": file.etag}
            if file.etag in request.headers.get("if-none-match", ""):  # one of several, or behind the `W/` of a proxy
                return Response(status_code=304, headers=headers)
            return Response(file.content, media_type=file.media_type, headers=headers)

        return serve

    for path, file in files.items():  # not by `add_route`: metrics know only FastAPI's own routes by their paths
        router.add_api_route(path, serving(file), methods=["GET", "HEAD"])

    @router.get("/page/samples/{seed}")
    async def sample(request: Request, seed: Annotated[int, Path(ge=0, le=MAX_SEED)]) -> Response:
        """A clip as the bundled models know them; the header `x-caption` tells what it shows."""
        with services.permit(request) as permit:
            clip = await services.deadline(permit, request.receive).run(clips.clip(seed))
        return Response(clip.content, media_type="video/mp4", headers={"x-caption": clip.caption})

    return router
