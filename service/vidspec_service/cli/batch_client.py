"""Sends the lines of `vidspec batch` to a server, some at a time; retries temporary failures: restarts, full queues."""

from __future__ import annotations

import asyncio
import base64
import json
import resource
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import unquote

import httpx
from h11 import LocalProtocolError

from vidspec_service.cli.batch_files import OWN_ROUTE, BatchRequest, BatchResult, OnResult
from vidspec_service.cli.chat_client import CONNECT_TIMEOUT_S
from vidspec_service.loopback import PROXY_ERRORS, async_client, server_url, shown

_RETRIED_STATUSES = (408, 425, 429, 502, 503, 504)
_AUTH_ERRORS = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
_MIN_WAIT_S, _MAX_WAIT_S = 0.5, 30.0
# All else is a video, whose format the server detects: for systems a .ts is a text, a .3gp sound and a .gif an image.
_IMAGES = {".jpeg": "image/jpeg", ".jpg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}


class ServerUnreachable(Exception):
    """The server answered nothing for `patience_s`, or refuses our key: the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How to ask any server."""

    timeout_s: float  # the longest silence
    patience_s: float  # how long lines are tried again if none is answered
    api_key: str | None
    folder: Path  # from which paths in lines start
    at_once: int  # lines on their way


class BatchClient:
    """Asks one server."""

    def __init__(self, url: str, options: ClientOptions, on_silence: Callable[[str], None]) -> None:
        """`on_silence` is told each time why there is no answer. Raises ServerUnreachable for an invalid address."""
        url = server_url(url)
        timeout = httpx.Timeout(options.timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            self._client = async_client(url, options.api_key, timeout)
        except (httpx.InvalidURL, *PROXY_ERRORS) as error:
            raise ServerUnreachable(f"{shown(url)}: {error}") from error
        self._options = options
        self._on_silence = on_silence

    async def send_all(self, lines: Iterable[BatchRequest], on_result: OnResult) -> None:
        """Ask all lines; a line is read only when it is its turn to be sent. Raises ServerUnreachable."""
        left, (_, most) = iter(lines), resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each line has a connection and its videos open
        # Patience begins anew with an answer to any line: our others may hold all places that the server gives us.
        self._answered_at = monotonic()

        async def ask() -> None:
            for line in left:  # an iterator that all askers share
                response, error = None, None
                try:
                    response = await self._response(line)
                except OSError as failed:
                    error = {"code": "file_not_readable", "message": f"{failed.filename}: {failed.strerror}"}
                except LocalProtocolError:  # its length was stated before its bytes were read
                    error = {"code": "file_not_readable", "message": "a file changed while it was sent, or is a pipe"}
                except (ValueError, RecursionError) as failed:  # a value that cannot be put into a request
                    error = {"code": "not_sendable", "message": str(failed)}
                on_result(BatchResult(line.custom_id, response, error))

        async with self._client:
            askers = [asyncio.create_task(ask()) for _ in range(self._options.at_once)]
            try:
                await asyncio.gather(*askers)
            finally:
                for asker in askers:
                    asker.cancel()
                await asyncio.gather(*askers, return_exceptions=True)

    async def _response(self, line: BatchRequest) -> dict[str, Any]:
        """The server's response, in the shape of OpenAI's batch results; retried while that may help."""
        wait_s, why, server = _MIN_WAIT_S, "", shown(self._client.base_url)
        while True:
            try:
                response = await self._post(line)
                if response.status_code in _AUTH_ERRORS:
                    raise ServerUnreachable(f"{server} needs a valid API key (HTTP {response.status_code})")
                if not _is_routed(response):
                    raise ServerUnreachable(
                        f"{shown(response.url)} is no route of vidspec (HTTP {response.status_code})"
                    )
                # A server of ours whose time for a request is over says that the next try would take as long.
                if response.status_code not in _RETRIED_STATUSES or response.headers.get("x-should-retry") == "false":
                    self._answered_at = monotonic()
                    return {
                        "status_code": response.status_code,
                        "request_id": response.headers.get("x-request-id", ""),
                        "body": _body(response),
                    }
                why = f"HTTP {response.status_code}"
                wait_s = max(wait_s, _asked_to_wait_s(response))
            except httpx.UnsupportedProtocol as error:  # retrying does not help
                raise ServerUnreachable(f"{server}: {error}") from error
            except httpx.RequestError as error:
                why = f"{type(error).__name__} {error}".strip()
                self._on_silence(f"{server}: {why}; retrying for {self._options.patience_s:g} s")
            if monotonic() + wait_s - self._answered_at > self._options.patience_s:
                raise ServerUnreachable(f"{server} does not answer {line.custom_id!r}: {why}")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)

    async def _post(self, line: BatchRequest) -> httpx.Response:
        videos = _paths(line.body.get("video")) if line.url == OWN_ROUTE else []
        if not videos:
            return await self._client.post(line.url, json=_with_files(line.body, self._options.folder))
        with ExitStack() as opened:
            contents = [opened.enter_context((self._options.folder / path).open("rb")) for path in videos]
            files = [("video", ("video", content, "application/octet-stream")) for content in contents]
            given = {name: value for name, value in line.body.items() if name != "video" and value is not None}
            fields = {name: _as_field(value) for name, value in given.items()}
            return await self._client.post(line.url, data=fields, files=files)


def _paths(video: object) -> list[str]:
    """The paths, if `video` has nothing else: the client sends the files, as the server takes data URLs only."""
    given = video if isinstance(video, list) else [video]
    paths = [each for each in given if isinstance(each, str) and each[:5].lower() != "data:"]
    return paths if len(paths) == len(given) else []


def _as_field(value: object) -> str | list[str]:
    """The value as a form field: structured values are JSON text, a list of strings is a repeated field."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    return json.dumps(value)


def _with_files(value: Any, folder: Path, field: str = "") -> Any:
    """The body with each `file:` address replaced by its file as a data URL; a text may begin like one."""
    if isinstance(value, dict):
        return {name: _with_files(each, folder, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_files(each, folder, field) for each in value]
    if isinstance(value, str) and value.startswith("file:") and field.endswith(("url", "data", "video")):
        path = folder / _path_of(value)
        kind = _IMAGES.get(path.suffix.lower(), "video/mp4")
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    return value


def _path_of(address: str) -> str:
    """The path behind `file:`, as it is; or in a URL, where some characters are written in percent."""
    path = address.removeprefix("file:")
    return unquote(path.removeprefix("//"), errors="surrogateescape") if path.startswith("//") else path


def _is_routed(response: httpx.Response) -> bool:
    """Whether one of vidspec's routes answered: in JSON, without redirects, and a 404 names a field in `param`."""
    if response.is_success:
        return "application/json" in response.headers.get("content-type", "")
    if response.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
        return not response.is_redirect
    match _body(response):
        case {"error": {"param": str()}}:
            return True
    return False


def _body(response: httpx.Response) -> Any:
    with suppress(ValueError):
        return response.json()
    return {"error": {"code": "not_json", "message": response.text[:1000]}}


def _asked_to_wait_s(response: httpx.Response) -> float:
    with suppress(ValueError):  # a date
        return min(float(response.headers.get("retry-after", 0)), _MAX_WAIT_S)
    return 0.0
