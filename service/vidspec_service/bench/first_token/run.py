"""The run of `bench first-token`: new files, one and several at once, for an answer of one token each.

Stages are those that the server tells of each answer (`timings`, `timeline`); what is left of the time that a client
waits is the way there and back.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx

from vidspec_models.bundled.scene import TEST_SEEDS
from vidspec_service.bench.common.camera_clip import ClipOptions
from vidspec_service.bench.common.options import number
from vidspec_service.bench.common.report import Tell
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, write_scene
from vidspec_service.bench.common.server import ROUTE, endless, own_server
from vidspec_service.errors import ConfigError

_TIMEOUT_S = 300.0


class Stage(StrEnum):
    """What a first token waits for, in order; the draft's work goes on beside it."""

    UPLOAD = "upload"  # and the answer's way back
    DECODE = "decode"  # and waiting for a decoder
    QUEUE = "queue"  # for the target
    TOWER = "tower"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenOptions(ClipOptions):
    """By default a minute of 720p, and always a rendered scene of four seconds."""

    num_frames: int | None = number(None, "--frames", "of each clip (default: the server's)")
    num_at_once: int = number(8, "--concurrency", "clips at once, after each alone")
    rounds: int = number(5, "--repeats", "each time with files that are new to the server")

    def form(self) -> dict[str, str]:
        """One token, and what was done when."""
        frames = {} if self.num_frames is None else {"num_frames": str(self.num_frames)}
        return {"prompt": CAPTION_PROMPT, "max_tokens": "1", "include": "timeline", **frames}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Work on one request, in seconds since a client began to send it."""

    stage: Stage
    worker: str  # "api", "target" or "draft"
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """One request, as its client and the server saw it."""

    seconds: float
    sent_s: float  # since its round began
    spans: tuple[Span, ...]

    def stage_s(self, stage: Stage) -> float:
        """What the first token waited for; the draft is not waited for."""
        return sum(each.end_s - each.start_s for each in self.spans if each.stage is stage and each.worker != "draft")

    @property
    def slowest_s(self) -> float:
        """The longest of the stages: a pipeline of them could not be faster."""
        return max(map(self.stage_s, Stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTimes:
    """Rounds of the same clip, so many at once."""

    clip: str
    num_at_once: int
    num_frames: int
    rounds: Sequence[Sequence[FirstToken]]


def measure_first_tokens(
    options: FirstTokenOptions, flags: Sequence[str], api_key: str | None, tell: Tell
) -> list[ClipTimes]:
    """Of a server started with `flags`. Raises ConfigError if it does not start or refuses a clip."""
    with tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder:
        scene = Path(folder) / "scene.mp4"
        write_scene(TEST_SEEDS[0], scene)
        files = [("scene of 4 s", scene), *options.files(Path(folder), tell)]
        clips = [(name, path.read_bytes()) for name, path in files]
    tell("starting a server", 0, 0)
    with own_server(flags) as server:
        return asyncio.run(_measured(options, clips, server.url, api_key, tell))


async def _measured(
    options: FirstTokenOptions, clips: Sequence[tuple[str, bytes]], url: str, api_key: str | None, tell: Tell
) -> list[ClipTimes]:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT_S) as client:
        found = []
        for name, clip in clips:
            copies = endless([clip], is_repeated=False)
            await ask(client, options, next(copies), time.perf_counter())
            for num_at_once in sorted({1, options.num_at_once}):
                rounds = []
                for done in range(options.rounds):
                    tell(f"{name}, {num_at_once} at once", done, options.rounds)
                    began = time.perf_counter()
                    asked = (ask(client, options, next(copies), began) for _ in range(num_at_once))
                    rounds.append(await asyncio.gather(*asked))
                num_frames = rounds[0][0][1]
                times = [[each for each, _ in one] for one in rounds]
                found.append(ClipTimes(clip=name, num_at_once=num_at_once, num_frames=num_frames, rounds=times))
        return found


async def ask(
    client: httpx.AsyncClient, options: FirstTokenOptions, clip: bytes, began: float
) -> tuple[FirstToken, int]:
    """With the number of frames that the model was given; raises ConfigError if there is no answer."""
    sent = time.perf_counter()
    try:
        response = await client.post(ROUTE, data=options.form(), files={"video": ("video", clip, "video/mp4")})
        seconds = time.perf_counter() - sent
        answer = response.json()
        if response.status_code != httpx.codes.OK:
            raise ConfigError(f"the server refused a clip: {answer['error']['message']}")
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"the server gave no answer: {str(error) or type(error).__name__}") from error
    spans = tuple(spans_of(answer["timings"], answer["timeline"], seconds))
    return FirstToken(seconds=seconds, sent_s=sent - began, spans=spans), answer["video"]["num_frames"]


def spans_of(timings: Mapping[str, float], timeline: Sequence[Mapping[str, Any]], seconds: float) -> Iterator[Span]:
    """Of an answer that took so long: the server's clock starts with the last byte of the request."""
    upload_s = max(seconds - timings["time_to_first_token_s"], 0.0)
    decoded_s = upload_s + timings["decode_s"]
    yield Span(stage=Stage.UPLOAD, worker="api", start_s=0.0, end_s=upload_s)
    yield Span(stage=Stage.DECODE, worker="api", start_s=upload_s, end_s=decoded_s)
    stages = {"prepare": Stage.TOWER, "prefill": Stage.PREFILL}
    prepared = min((each["start_s"] for each in timeline if each["worker"] == "target"), default=0.0)
    if (taken_up_s := upload_s + prepared) > decoded_s:
        yield Span(stage=Stage.QUEUE, worker="api", start_s=decoded_s, end_s=taken_up_s)
    for each in timeline:
        start_s, end_s = upload_s + each["start_s"], upload_s + each["end_s"]
        if (stage := stages.get(each["phase"])) is not None and start_s < seconds:
            yield Span(stage=stage, worker=each["worker"], start_s=start_s, end_s=min(end_s, seconds))
