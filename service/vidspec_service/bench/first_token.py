"""`bench first-token`: where the time to the first token goes, over HTTP, with new files, one and several at once.

The server reports each answer's stages (`timings`, `timeline`); the rest of the time that the client waits is the
transfer of request and answer.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from vidspec_models.bundled.scene import TEST_SEEDS
from vidspec_service.bench.common.loops import until_interrupted
from vidspec_service.bench.common.options import number, option
from vidspec_service.bench.common.report import OnProgress, Plot, Report, Row, column, table
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, ClipOptions, write_scene
from vidspec_service.bench.common.server import ROUTE, cycle_clips, local_server
from vidspec_service.errors import ConfigError
from vidspec_service.loopback import async_client

_TIMEOUT_S = 300.0
_LANE = 0.8


class Stage(StrEnum):
    """What a first token waits for, in order; the draft works in parallel."""

    UPLOAD = "upload"  # includes the answer's transfer back
    DECODE = "decode"  # includes waiting for a decoder
    QUEUE = "queue"  # waiting for the target, also between its tower and parts of its prefill
    TOWER = "tower"
    PREFILL = "prefill"


_COLOURS = dict(zip(Stage, ("#d9d9d9", "#7f9f3f", "#f0f0f0", "#e08e45", "#1f5f8b"), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenOptions(ClipOptions):
    """By default a minute of 720p; a rendered scene of four seconds is always measured, too."""

    num_frames: int | None = number(None, "--frames", "frames of each clip (default: the server's)")
    num_at_once: int = number(8, "--concurrency", "clips at once, after each clip alone")
    rounds: int = number(5, "--repeats", "rounds, each with files that are new to the server")
    is_same: bool = option(
        False,
        "--same-clip",
        "one file in all requests of a round: several questions about a video",
        action="store_true",
    )

    def form(self) -> dict[str, str]:
        """Form fields of a request for one token and the timeline of its stages."""
        frames = {} if self.num_frames is None else {"num_frames": str(self.num_frames)}
        return {"prompt": CAPTION_PROMPT, "max_tokens": "1", "include": "timeline", **frames}

    def files_of_round(self, copies: Iterator[bytes], num: int) -> list[bytes]:
        """The files of a round of `num` requests, from an iterator over files that are all different."""
        return [next(copies)] * num if self.is_same else [next(copies) for _ in range(num)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """One piece of work on a request, in seconds since the client began to send it."""

    stage: Stage
    worker: str  # "api", "target" or "draft"
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """One request, as its client and the server saw it."""

    seconds: float
    sent_s: float  # since its round began
    spans: tuple[StageSpan, ...]

    def stage_s(self, stage: Stage) -> float:
        """Seconds of a stage, without the draft's work: the first token does not wait for the draft."""
        return sum(each.end_s - each.start_s for each in self.spans if each.stage is stage and each.worker != "draft")

    @property
    def slowest_s(self) -> float:
        """Seconds of the longest stage: a lower bound even if the stages were pipelined."""
        return max(map(self.stage_s, Stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTimes:
    """Rounds of the same clip, each with `num_at_once` requests at once."""

    clip: str
    num_at_once: int
    num_frames: int
    rounds: Sequence[Sequence[FirstToken]]


def measure_first_tokens(
    options: FirstTokenOptions, flags: Sequence[str], api_key: str | None, on_progress: OnProgress
) -> list[ClipTimes]:
    """Measure a server started with `flags`. Raises ConfigError if it does not start or refuses a clip."""
    with tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder:
        scene = Path(folder) / "scene.mp4"
        write_scene(TEST_SEEDS[0], scene)
        files = [("scene of 4 s", scene), *options.files(Path(folder), on_progress)]
        clips = [(name, path.read_bytes()) for name, path in files]
    on_progress("starting a server", 0, 0)
    with local_server(flags) as server:
        return asyncio.run(_measured(options, clips, async_client(server.url, api_key, _TIMEOUT_S), on_progress))


async def _measured(
    options: FirstTokenOptions, clips: Sequence[tuple[str, bytes]], client: httpx.AsyncClient, on_progress: OnProgress
) -> list[ClipTimes]:
    found = []
    async with client:
        for name, clip in until_interrupted(clips):
            copies = cycle_clips([clip], is_repeated=False)
            try:
                _, num_frames = await send_clip(client, options, next(copies), time.perf_counter())  # the warm-up
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
            label = f"{name}, one file a round" if options.is_same else name
            for num_at_once in sorted({1, options.num_at_once}):
                rounds = []
                for done in range(options.rounds):
                    on_progress(f"{label}, {num_at_once} at once", done, options.rounds)
                    began = time.perf_counter()
                    files = options.files_of_round(copies, num_at_once)
                    answers = await asyncio.gather(*(send_clip(client, options, each, began) for each in files))
                    rounds.append([each for each, _ in answers])
                found.append(ClipTimes(clip=label, num_at_once=num_at_once, num_frames=num_frames, rounds=rounds))
    return found


async def send_clip(
    client: httpx.AsyncClient, options: FirstTokenOptions, clip: bytes, began: float
) -> tuple[FirstToken, int]:
    """Send a clip; also returns the number of frames that the model got. Raises ConfigError if there is no answer."""
    sent = time.perf_counter()
    try:
        response = await client.post(ROUTE, data=options.form(), files={"video": ("video", clip, "video/mp4")})
        seconds = time.perf_counter() - sent
        answer = response.json()
        if response.status_code != httpx.codes.OK:
            raise ConfigError(f"the server refused the clip: {answer['error']['message']}")
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"the server gave no answer: {str(error) or type(error).__name__}") from error
    spans = tuple(spans_of(answer["timings"], answer["timeline"], seconds))
    return FirstToken(seconds=seconds, sent_s=sent - began, spans=spans), answer["video"]["num_frames"]


def spans_of(
    timings: Mapping[str, float], timeline: Sequence[Mapping[str, Any]], seconds: float
) -> Iterator[StageSpan]:
    """The spans of an answer that took `seconds`. The server's clock starts at the last byte of the request."""
    upload_s = max(seconds - timings["time_to_first_token_s"], 0.0)
    decoded_s = upload_s + timings["decode_s"]
    yield StageSpan(stage=Stage.UPLOAD, worker="api", start_s=0.0, end_s=upload_s)
    yield StageSpan(stage=Stage.DECODE, worker="api", start_s=upload_s, end_s=decoded_s)
    stages = {"prepare": Stage.TOWER, "prefill": Stage.PREFILL}
    ready_s = decoded_s  # for the target's next work on it
    for each in sorted(timeline, key=lambda span: float(span["start_s"])):
        start_s, end_s = upload_s + each["start_s"], min(upload_s + each["end_s"], seconds)
        if (stage := stages.get(each["phase"])) is None or start_s >= seconds:
            continue
        if each["worker"] == "target":
            if start_s > ready_s:
                yield StageSpan(stage=Stage.QUEUE, worker="api", start_s=ready_s, end_s=start_s)
            ready_s = max(ready_s, end_s)
        yield StageSpan(stage=stage, worker=each["worker"], start_s=start_s, end_s=end_s)


def clip_row(times: ClipTimes) -> Row:
    """Medians over all requests; `over_slowest` is the time to the first token over that of the slowest stage."""
    every = [each for one in times.rounds for each in one]
    ends = [max(each.sent_s + each.seconds for each in one) for one in times.rounds]
    return {
        "clip": times.clip,
        "at_once": times.num_at_once,
        "frames": times.num_frames,
        "first_token_s": median(each.seconds for each in every),
        "slowest_request_s": max(each.seconds for each in every),
        **{f"{stage}_s": median(each.stage_s(stage) for each in every) for stage in Stage},
        "over_slowest": median(each.seconds / each.slowest_s for each in every),
        "answers_per_s": times.num_at_once / median(ends),
    }


def first_token_report(found: Sequence[ClipTimes], models: str) -> Report:
    """Figures, table and plot of the measurements."""
    rows, alone = [clip_row(times) for times in found], 1.0
    for row in rows:  # each clip's row with one request at a time comes first
        alone = row["answers_per_s"] if row["at_once"] == 1 else alone
        row["over_one_by_one"] = row["answers_per_s"] / alone
    columns = {
        "clip": column("clip"),
        "at once": column("at_once"),
        "frames": column("frames"),
        "first token": column("first_token_s", "{:.0f}", 1000),
        "slowest": column("slowest_request_s", "{:.0f}", 1000),
        **{stage.value: column(f"{stage}_s", "{:.0f}", 1000) for stage in Stage},
        "over stage": column("over_slowest", "{:.2f}x"),
        "answers/s": column("answers_per_s", "{:.2f}"),
        "over 1 by 1": column("over_one_by_one", "{:.2f}x"),
    }
    return Report(
        bench="first-token",
        baseline="the slowest stage alone; for answers per second: one request after the other",
        facts={
            "models": models,
            "requests": f"{len(found[0].rounds)} rounds, one token each, new files in each",
        },
        figures={"clips": rows, "rounds": found},
        body=[
            table("Time to the first token over HTTP, medians in ms", columns, rows),
            "slowest: of all requests; upload: includes the way back; decode: includes the wait for a decoder;",
            "over stage: first token over the slowest stage before it; over 1 by 1: answers/s at once over one by one",
        ],
        plots={"plot": Plot(size=(9, sum(map(_height, found))), draw=lambda figure: _draw(figure, found))},
    )


def _height(times: ClipTimes) -> float:
    return 1.0 + 0.25 * max(times.num_at_once, 2)


def _draw(figure: Any, found: Sequence[ClipTimes]) -> None:
    """Draw each clip's first round: one request as two lanes, one per worker; several requests as one lane each."""
    from matplotlib.patches import Patch

    all_axes = figure.subplots(len(found), 1, squeeze=False, height_ratios=[*map(_height, found)])[:, 0]
    for axes, times in zip(all_axes, found, strict=True):
        for lane, request in enumerate(times.rounds[0]):
            for span in request.spans:
                is_beside = span.worker == "draft"
                if is_beside and times.num_at_once > 1:
                    continue
                bar = (1000 * (request.sent_s + span.start_s), 1000 * (span.end_s - span.start_s))
                place = (lane + is_beside - _LANE / 2, _LANE)
                axes.broken_barh([bar], place, color=_COLOURS[span.stage], edgecolor="white", linewidth=0.3)
        lanes = ("target", "draft") if times.num_at_once == 1 else ()
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        title = f"{times.clip}: {times.num_at_once} at once, {times.num_frames} frames"
        axes.set_title(title, parse_math=False)
        axes.set_xlabel("ms")
    handles = [Patch(color=_COLOURS[stage], label=stage.value) for stage in Stage if stage is not Stage.QUEUE]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
