"""The page's files, as the wheel has them: read once, served without a key, since nothing in them is anybody's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

INDEX = "index.html"
_FOLDER = "vidspec_service.api.page"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One of them."""

    content: bytes
    media_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """By the path under which each is served, with a leading slash: the page itself at `/`."""
    found = {}
    for file in (resources.files(_FOLDER) / "static").iterdir():
        content = file.read_bytes()
        path = "/" if file.name == INDEX else f"/page/{file.name}"
        media_type = _MEDIA_TYPES["." + file.name.rpartition(".")[2]]
        found[path] = PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
