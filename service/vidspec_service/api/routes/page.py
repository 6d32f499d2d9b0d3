"""GET /: a page to ask, watch and compare with, from files in the wheel; and clips for users without a video.

The clips are those that `vidspec render-clip` writes, rendered in a child process. This keeps PyAV out of the API
process, and its event loop free: a clip takes a core for a third of a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

import fastapi
from cachetools import LRUCache
from fastapi import APIRouter, Request, Response

from vidspec_service.api.services import Services
from vidspec_service.errors import CapacityError

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
MAX_SEED = 9999
_MAX_CACHED = 16  # clips of some 20 kB
_TIMEOUT_S = 20.0


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
    async def sample(request: Request, seed: Annotated[int, fastapi.Path(ge=0, le=MAX_SEED)]) -> Response:
        """A clip as the bundled models know them; the header `x-caption` tells what it shows."""
        with services.permit(request) as permit:
            clip = await services.deadline(permit, request.receive).run(clips.clip(seed))
        return Response(clip.content, media_type="video/mp4", headers={"x-caption": clip.caption})

    return router


@dataclass(frozen=True, slots=True)
class SampleClip:
    """An MP4 file, and the true caption of what it shows."""

    content: bytes
    caption: str


class SampleClips:
    """Renders in one child at a time and keeps the latest clips. For one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sample")
        self._kept: LRUCache[int, SampleClip] = LRUCache(_MAX_CACHED)

    async def clip(self, seed: int) -> SampleClip:
        """The clip of `seed`, from 0 to MAX_SEED; raises CapacityError if the machine is too busy."""
        if seed not in self._kept:
            self._kept[seed] = await asyncio.get_running_loop().run_in_executor(self._thread, _render, seed)
        return self._kept[seed]


def _render(seed: int) -> SampleClip:
    with tempfile.TemporaryDirectory(prefix="vidspec-sample-") as folder:
        path = Path(folder, "clip.mp4")
        command = [sys.executable, "-m", "vidspec_service", "render-clip", "--seed", str(seed), str(path)]
        try:
            child = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
        except subprocess.TimeoutExpired:
            raise CapacityError("The server had no time to render the clip; try again.") from None
        return SampleClip(path.read_bytes(), child.stdout.decode().strip())
