"""One request over HTTP, streamed and timed from the outside: what a client sees, and nothing else."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from vidspec_service.errors import ConfigError

ROUTE = "/v1/video-chat"
_PROMPT = "Describe the video."


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to send, and whether to stay for the answer."""

    clip: bytes
    max_tokens: int
    num_frames: int | None = None
    leave_after_events: int | None = None  # close the connection after so many events of the stream
    leave_after_bytes: int | None = None  # or after so many bytes of the upload

    def fields(self) -> dict[str, str]:
        """The form without its video."""
        fields = {"prompt": _PROMPT, "stream": "true", "max_tokens": str(self.max_tokens)}
        return fields if self.num_frames is None else {**fields, "num_frames": str(self.num_frames)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a question; times in seconds since it was due. `status` 0: no HTTP answer at all."""

    due_s: float  # since the load began
    status: int
    code: str | None = None  # the server's error code, also of an error inside a stream; or why there was no answer
    ttft_s: float | None = None
    e2e_s: float
    num_tokens: int = 0
    is_complete: bool = False
    left_early: bool = False

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than two."""
        if self.ttft_s is None or self.num_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1)


class Asker:
    """Asks one server, over as many connections as it takes."""

    def __init__(self, url: str, timeout_s: float, api_key: str | None) -> None:
        self._url = httpx.URL(url)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, limits=limits)

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """The name of the model that answers. Raises ConfigError if this server cannot be asked."""
        try:
            answer = await self._client.get("/v1/models")
            if answer.status_code == httpx.codes.OK:
                return str(answer.json()["data"][0]["id"])
            reason = f"HTTP {answer.status_code}: {answer.json()['error']['message']}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
        except (ValueError, KeyError, TypeError, IndexError):
            reason = "it does not look like vidspec"
        raise ConfigError(f"{self._url} cannot be asked: {reason}")

    async def ask(self, question: Question, began: float, due_s: float) -> Outcome:
        """`began` is the load's start on the clock of `time.perf_counter`, `due_s` when this was to be sent.

        Timed from then, not from when this process came to sending it: a slow server must not slow its own test.
        """
        watch = _Watch(began + due_s)
        try:
            if question.leave_after_bytes is not None:
                await self._abandon_upload(question, question.leave_after_bytes)
                found: dict[str, Any] = {"status": 0, "left_early": True}
            else:
                found = await self._stream(question, watch)
        except (httpx.HTTPError, OSError, ValueError) as error:
            found = {"status": 0, "code": type(error).__name__}
        e2e_s = watch.last_s if found["status"] == httpx.codes.OK and "code" not in found else watch.elapsed_s
        return Outcome(due_s=due_s, ttft_s=watch.first_s, e2e_s=e2e_s, **found)

    async def _stream(self, question: Question, watch: _Watch) -> dict[str, Any]:
        files = {"video": ("video", question.clip, "video/mp4")}
        async with self._client.stream("POST", ROUTE, data=question.fields(), files=files) as response:
            if response.status_code != httpx.codes.OK:
                return {
                    "status": response.status_code,
                    "code": json.loads(await response.aread())["error"]["code"],
                }
            num_tokens, num_events = 0, 0
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                num_events += 1
                chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return {"status": 200, "code": chunk["error"]["code"]}
                watch.see(chunk)
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
                if num_events == question.leave_after_events:
                    break
        left = question.leave_after_events is not None and num_tokens == 0
        return {"status": 200, "num_tokens": num_tokens, "is_complete": num_tokens > 0, "left_early": left}

    async def _abandon_upload(self, question: Question, num_bytes: int) -> None:
        """Begin to send, then hang up."""
        request = self._client.build_request(
            "POST", ROUTE, data=question.fields(), files={"video": ("video", question.clip, "video/mp4")}
        )
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        _, writer = await asyncio.open_connection(
            self._url.host, self._url.port or 80, ssl=self._url.scheme == "https" or None
        )
        try:
            writer.write(f"POST {ROUTE} HTTP/1.1\r\n{head}\r\n".encode() + request.read()[:num_bytes])
            await writer.drain()
        finally:
            writer.close()


class _Watch:
    """The moments of one answer, since `start` on the clock of `time.perf_counter`."""

    def __init__(self, start: float) -> None:
        self._start = start
        self.first_s: float | None = None
        self.last_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    def see(self, chunk: dict[str, Any]) -> None:
        """Note the first and the last piece of text."""
        choices = chunk.get("choices") or [{}]
        if choices[0].get("delta", {}).get("content"):
            self.last_s = self.elapsed_s
            self.first_s = self.last_s if self.first_s is None else self.first_s
        elif self.first_s is None:
            self.last_s = self.elapsed_s
