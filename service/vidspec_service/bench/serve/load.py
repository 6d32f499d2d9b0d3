"""Closed loads (a fixed number of requests at once) and open ones (at fixed times, however slow the server is).

Also their requests, about rendered scenes, each timed only by what its client sees; some clients leave early.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from vidspec_models.bundled.scene import TEST_SEEDS
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, write_scene
from vidspec_service.bench.common.server import ROUTE
from vidspec_service.errors import ConfigError
from vidspec_service.loopback import PROXY_ERRORS, async_client, server_url, shown

_CANCEL_SHARE, _HANG_UP_SHARE = 0.25, 0.15
_SIZES = (256, 128, 512)  # pixels a side; the first is `render-clip`'s

OnDone = Callable[[int], None]  # called with the number of answers so far


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What to send, and whether to leave before the answer ends."""

    clip: bytes
    max_tokens: int
    num_frames: int | None = None
    leave_after_events: int | None = None  # close the connection after this many events of the stream
    leave_after_bytes: int | None = None  # or after this many bytes of the upload

    def form(self) -> dict[str, Any]:
        """The form as keyword arguments of httpx."""
        fields = {"prompt": CAPTION_PROMPT, "stream": "true", "max_tokens": str(self.max_tokens)}
        if self.num_frames is not None:
            fields["num_frames"] = str(self.num_frames)
        return {"data": fields, "files": {"video": ("video", self.clip, "video/mp4")}}


@dataclass(slots=True, kw_only=True)
class RequestOutcome:
    """The result of a request. Times are in seconds since the request was due. `status` 0: no HTTP answer at all."""

    due_s: float  # since the load began
    status: int = 0
    code: str | None = None  # the server's error code (also of an error inside a stream), or why there was no answer
    ttft_s: float | None = None
    e2e_s: float = 0.0  # for a whole answer, until its last piece of text
    num_tokens: int = 0
    is_complete: bool = False
    left_early: bool = False

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than two."""
        if self.ttft_s is None or self.num_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1)


class LoadClient:
    """Sends to one server. The constructor raises ConfigError for an address that cannot be asked."""

    def __init__(self, address: str, timeout_s: float, api_key: str | None) -> None:
        self._url = server_url(address)
        try:
            self._client = async_client(self._url, api_key, timeout_s)
        except (httpx.InvalidURL, *PROXY_ERRORS) as error:
            raise ConfigError(f"{shown(address)} cannot be asked: {error}") from None

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """The name of the server's model. Raises ConfigError if the server cannot be asked."""
        try:
            answer = await self._client.get("/v1/models")
            if answer.status_code == httpx.codes.OK:
                return str(answer.json()["data"][0]["id"])
            reason = f"HTTP {answer.status_code}: {answer.json()['error']['message']}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
        except (ValueError, KeyError, TypeError, IndexError):
            reason = "it does not look like vidspec"
        raise ConfigError(f"{shown(self._url)} cannot be asked: {reason}")

    async def send(self, request: LoadRequest, began: float, due_s: float) -> RequestOutcome:
        """`began` is the load's start on the clock of `time.perf_counter`; `due_s` after it, the request is due.

        Times count from then, not from when the request was really sent: a slow server must not slow its own test.
        """
        outcome, due = RequestOutcome(due_s=due_s), began + due_s
        try:
            if request.leave_after_bytes is not None:
                await self._abandon_upload(request, request.leave_after_bytes)
                outcome.left_early = True
            else:
                await self._stream(request, outcome, due)
        except (httpx.HTTPError, OSError, ValueError) as error:
            outcome.status, outcome.code = 0, type(error).__name__
        if outcome.status != httpx.codes.OK or outcome.code is not None:
            outcome.e2e_s = time.perf_counter() - due
        return outcome

    async def _stream(self, request: LoadRequest, outcome: RequestOutcome, due: float) -> None:
        """Record the answer, and when its first and last pieces of text arrived."""
        async with self._client.stream("POST", ROUTE, **request.form()) as response:
            outcome.status = response.status_code
            if outcome.status != httpx.codes.OK:
                outcome.code = _code_of(await response.aread())
                return
            num_tokens, num_events = 0, 0
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                num_events += 1
                chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    outcome.code = chunk["error"]["code"]
                    return
                _record_time(chunk, outcome, time.perf_counter() - due)
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
                if num_events == request.leave_after_events:
                    outcome.left_early = num_tokens == 0
                    break
        outcome.num_tokens, outcome.is_complete = num_tokens, num_tokens > 0

    async def _abandon_upload(self, abandoned: LoadRequest, num_bytes: int) -> None:
        """Send the first `num_bytes` of the request, then close the connection."""
        full_request = self._client.build_request("POST", ROUTE, **abandoned.form())

        async def beginning() -> AsyncIterator[bytes]:
            yield full_request.read()[:num_bytes]
            raise EOFError  # the body is shorter than its headers announce, so httpx closes the connection

        with suppress(EOFError):
            await self._client.post(ROUTE, headers=full_request.headers, content=beginning())


def _code_of(body: bytes) -> str:
    """The code of an error; a proxy in front of the server, or another server, writes errors of another form."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "without a code"


def _record_time(chunk: dict[str, Any], outcome: RequestOutcome, now_s: float) -> None:
    choices = chunk.get("choices") or [{}]
    delta = choices[0].get("delta", {})
    if delta.get("content") or delta.get("reasoning"):
        outcome.e2e_s = now_s
        outcome.ttft_s = now_s if outcome.ttft_s is None else outcome.ttft_s
    elif outcome.ttft_s is None:
        outcome.e2e_s = now_s


async def closed_load(
    client: LoadClient, requests: Iterable[LoadRequest], concurrency: int, on_done: OnDone
) -> tuple[list[RequestOutcome], float]:
    """Outcomes in the order in which requests ended, and the seconds that the load took."""
    began, outcomes, waiting = time.perf_counter(), list[RequestOutcome](), iter(requests)

    async def sender() -> None:
        for request in waiting:  # all senders share one iterator
            outcomes.append(await client.send(request, began, time.perf_counter() - began))
            on_done(len(outcomes))

    async with asyncio.TaskGroup() as senders:
        for _ in range(concurrency):
            senders.create_task(sender())
    return outcomes, time.perf_counter() - began


async def open_load(
    client: LoadClient, requests: Iterator[LoadRequest], due_s: Sequence[float], on_done: OnDone
) -> tuple[list[RequestOutcome], float]:
    """Send a request at each time in `due_s` (seconds since the start); returns when all have ended."""
    began, outcomes = time.perf_counter(), list[RequestOutcome]()

    async def send(request: LoadRequest, due: float) -> None:
        outcomes.append(await client.send(request, began, due))
        on_done(len(outcomes))

    async with asyncio.TaskGroup() as senders:
        for due, request in zip(due_s, requests, strict=False):
            await asyncio.sleep(max(began + due - time.perf_counter(), 0))
            senders.create_task(send(request, due))
    return outcomes, time.perf_counter() - began


def poisson_times(rate: float, rng: random.Random) -> Iterator[float]:
    """Arrival times of a Poisson process, without end."""
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


def render_clips(count: int, *, is_mixed: bool) -> list[bytes]:
    """MP4 files of four seconds, all of one size or, if mixed, of several."""
    clips = []
    with tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder:
        for index in range(count):
            size = _SIZES[index % len(_SIZES)] if is_mixed else _SIZES[0]
            path = Path(folder) / f"{index}.mp4"
            write_scene(TEST_SEEDS[index], path, size)
            clips.append(path.read_bytes())
    return clips


def mixed_requests(
    clips: Iterator[bytes], most_tokens: int, num_frames: int | None, rng: random.Random
) -> Iterator[LoadRequest]:
    """Requests for answers of any length; a quarter are cancelled, 15 % are never fully sent."""
    for clip in clips:
        fate = rng.random()
        yield LoadRequest(
            clip=clip,
            max_tokens=rng.randint(1, most_tokens),
            num_frames=rng.choice((None, 1, 4, 8)) if num_frames is None else num_frames,
            leave_after_events=rng.randint(1, 1 + most_tokens // 4) if fate < _CANCEL_SHARE else None,
            leave_after_bytes=rng.randrange(len(clip)) if fate > 1 - _HANG_UP_SHARE else None,
        )
