"""What `vidspec chat` says to a server: forms, answered as JSON or as events. Knows no terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

import httpx
from h11 import LocalProtocolError

from vidspec_service.loopback import PROXY_ERRORS, is_loopback, server_url, shown

_ASK, _KEEP = "/v1/video-chat", "/v1/videos"
Video = BinaryIO | str  # a file, or the id of a video that the server keeps
CONNECT_TIMEOUT_S = 10.0


class ChatFailed(Exception):
    """No answer, or not all of it; the message says why in the server's words where it has any.

    `status` is that of the server's refusal.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ChatClient:
    """Asks one server. `timeout_s` is the longest silence, not the longest answer."""

    def __init__(self, url: str, timeout_s: float, api_key: str | None) -> None:
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._url = server_url(url)
        self._timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)

    def keep(self, video: BinaryIO) -> dict[str, Any]:
        """Uploads a file for several questions; returns its `id` and facts. Raises ChatFailed."""
        with self._posted(_KEEP, video) as response:
            return _object(response.read().decode())

    def ask(self, video: Video, fields: Mapping[str, object]) -> dict[str, Any]:
        """The whole answer; raises ChatFailed."""
        with self._posted(_ASK, video, {**fields, "stream": False}) as response:
            return _object(response.read().decode())

    def stream(self, video: Video, fields: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """The answer's chunks as they come, the last with its summary; raises ChatFailed."""
        with self._posted(_ASK, video, {**fields, "stream": True}) as response:
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue  # a keep-alive comment, or the empty line after an event
                chunk = _object(line.removeprefix("data:"))
                if "error" in chunk:
                    raise ChatFailed(_reason(chunk))
                yield chunk
                if "usage" in chunk:
                    return
        raise ChatFailed("the server ended the stream before the answer was complete")

    def _client(self) -> httpx.Client:
        direct = httpx.HTTPTransport() if is_loopback(self._url) else None
        try:
            return httpx.Client(timeout=self._timeout, headers=self._headers, transport=direct)
        except PROXY_ERRORS as error:
            raise ChatFailed(f"{shown(self._url)} cannot be asked: {error}") from error

    @contextmanager
    def _posted(self, route: str, video: Video, fields: Mapping[str, object] | None = None) -> Iterator[httpx.Response]:
        data = {name: value if isinstance(value, list) else str(value) for name, value in (fields or {}).items()}
        try:
            with (
                self._client() as client,
                client.stream("POST", self._url + route, data=data, files=_parts(video)) as response,
            ):
                if not response.is_success:
                    raise ChatFailed(_refusal(response), response.status_code)
                yield response
        except LocalProtocolError as error:  # its length was stated before its bytes were read
            name = getattr(video, "name", video)
            raise ChatFailed(f"{name} changed while it was sent, or is a pipe: copy it to a file first") from error
        except UnicodeEncodeError as error:
            raise ChatFailed(f"{error.object!r} is not valid text") from error
        except httpx.ConnectError as error:
            hint = "does it run, and has it loaded its models? `vidspec serve` starts one"
            raise ChatFailed(f"no server at {shown(self._url)} ({hint}; {error})") from error
        except httpx.TimeoutException as error:
            raise ChatFailed(f"{shown(self._url)} was silent for too long ({type(error).__name__})") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # of a host's name, of an answer
            raise ChatFailed(f"the connection to {shown(self._url)} failed: {error}") from error


def _parts(video: Video) -> dict[str, Any]:
    """The form's part for the video."""
    if isinstance(video, str):
        return {"video_id": (None, video)}
    # File names say much about their owner and nothing about a video: the server gets none of ours.
    return {"video": ("video", video, "application/octet-stream")}


def _refusal(response: httpx.Response) -> str:
    try:
        return f"{_reason(_object(response.read().decode()))} (HTTP {response.status_code})"
    except (ChatFailed, KeyError, AttributeError, UnicodeDecodeError):
        return f"HTTP {response.status_code} from {shown(response.url)}, which does not look like vidspec"


def _reason(body: dict[str, Any]) -> str:
    error = body["error"]
    param = f" [{error['param']}]" if error.get("param") else ""
    return f"{error['code']}: {error['message']}{param}"


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ChatFailed("the server's answer is not JSON") from error
    if not isinstance(value, dict):
        raise ChatFailed("the server's answer is not a JSON object")
    return value
