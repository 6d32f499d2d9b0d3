"""`bench serve` from options to report: one load, an overload of a capacity measured first, or a soak."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path

import psutil

from vidspec_service.arguments import existing_file, positive_float
from vidspec_service.bench.common.loops import until_interrupted
from vidspec_service.bench.common.options import number, option
from vidspec_service.bench.common.report import OnProgress, Report, Row
from vidspec_service.bench.common.server import LocalServer, cycle_clips, local_server
from vidspec_service.bench.serve.load import (
    LoadClient,
    LoadRequest,
    OnDone,
    RequestOutcome,
    closed_load,
    mixed_requests,
    open_load,
    poisson_times,
    render_clips,
)
from vidspec_service.bench.serve.report import Objectives, load_result, serve_report

_WARM_UP = 2
_SOAK_WARM_UP_SHARE = 0.2  # until caches are full and allocators stop growing
_SOAK_SAMPLES = 50
_IDLE_TIMEOUT_S, _POLL_S = 30.0, 0.5
_STEADY = ("num_processes", "num_descriptors")
_GRACE_S = 30.0  # a client waits this much longer than the server's deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(Objectives):
    """One load: open with `rate`, else closed with `concurrency`. `overload` and `soak` are other kinds of runs."""

    url: str | None = option(
        None, "--url", "ask this server (default: start one and stop it afterwards)", metavar="URL"
    )
    num_requests: int = number(64, "--requests", "number of requests")
    concurrency: int = number(8, "--concurrency", "requests at once", default=None)
    rate: float | None = number(None, "--rate", "open load: R arrivals a second, Poisson", "R", type=positive_float)
    overload: float | None = number(
        None, "--overload", "measure the capacity, then offer FACTOR times as much", "FACTOR", type=positive_float
    )
    duration_s: float = number(120.0, "--duration-s", "duration of --overload", "S", default=None)
    soak: int | None = number(None, "--soak", "send N requests of all sizes; many clients disconnect early")
    warm_up: int | None = number(None, "--warm-up", "requests before --soak that fill the caches (default a fifth)")
    clips: tuple[Path, ...] = option(
        (), "--clip", "send these files instead of rendered clips", type=existing_file, nargs="+", metavar="FILE"
    )
    num_clips: int = number(8, "--clips", "number of clips to render")
    has_repeated_files: bool = option(
        False, "--repeat-files", "send the same files again, so that caches help", action="store_true"
    )
    max_tokens: int = number(64, "--max-tokens", "maximum tokens per answer")
    num_frames: int | None = number(None, "--frames", "frames of each clip (default: the server's)")
    seed: int = number(0, "--seed", "seed of arrivals and early disconnects", type=int)

    def as_settings(self) -> Row:
        """The settings that the figures depend on."""
        return {
            "max_tokens": self.max_tokens,
            "num_frames": self.num_frames,
            "clips": len(self.clips) or self.num_clips,
            "repeated_files": self.has_repeated_files,
            "slo_ttft_s": self.ttft_s,
            "slo_tpot_s": self.tpot_s,
            "deadline_s": self.deadline_s,
            "seed": self.seed,
        }


def measure_serving(options: ServeOptions, flags: list[str], api_key: str | None, on_progress: OnProgress) -> Report:
    """Run against `options.url`, or a server started with `flags`. Raises ConfigError if the server does not start."""
    if options.clips:
        clips = [path.read_bytes() for path in options.clips]
    else:
        on_progress("rendering clips", 0, 0)
        clips = render_clips(options.num_clips, is_mixed=options.soak is not None)
    if options.url is None:
        on_progress("starting a server", 0, 0)
    with nullcontext() if options.url else monitored_server(flags) as monitored:
        address = monitored.server.url if monitored else options.url or ""
        client = LoadClient(address, options.deadline_s + _GRACE_S, api_key)
        run = _Run(options, client, cycle_clips(clips, is_repeated=options.has_repeated_files), on_progress)
        asyncio.run(run.measure(monitored))
    return serve_report(
        run.loads,
        run.outcomes,
        run.soaked,
        {"model": run.model, "server": options.url or "its own", "settings": options.as_settings()},
    )


@dataclass(slots=True)
class _Run:
    """One measurement of a running server."""

    options: ServeOptions
    client: LoadClient
    clips: Iterator[bytes]
    on_progress: OnProgress
    model: str = ""
    loads: list[Row] = field(default_factory=list)
    outcomes: dict[str, list[RequestOutcome]] = field(default_factory=dict)
    soaked: Row | None = None

    async def measure(self, monitored: MonitoredServer | None) -> None:
        options, rng = self.options, random.Random(self.options.seed)
        async with self.client:
            self.model = await self.client.model()  # fails early if the server is unreachable or refuses the API key
            await closed_load(self.client, self.requests(_WARM_UP), 1, self._on_done("warming up", _WARM_UP))
            if options.soak is not None:
                assert monitored is not None
                self.soaked = await self._soak(monitored, options.soak, rng)
            elif options.overload is not None:
                capacity = await self._load("capacity")
                rate = options.overload * max(capacity["answered_per_s"], 1e-3)
                times = list(takewhile(lambda due_s: due_s < options.duration_s, poisson_times(rate, rng)))
                await self._load(f"{options.overload:g}x overload", times)
            elif options.rate is not None:
                times = list(islice(poisson_times(options.rate, rng), options.num_requests))
                await self._load(f"open, {options.rate:g} a second", times)
            else:
                await self._load(f"closed, {options.concurrency} at once")

    async def _soak(self, monitored: MonitoredServer, total: int, rng: random.Random) -> Row:
        """Send requests of all sizes that often leave early, and record the footprint of the server's process tree.

        `before` is taken after the warm-up and `after` at the end, both with an idle server; `samples` are taken under
        load, each with the number of requests that had ended.
        """
        options = self.options
        num_warm_up = options.warm_up or max(round(_SOAK_WARM_UP_SHARE * total), 1)
        requests = mixed_requests(self.clips, options.max_tokens, options.num_frames, rng)
        on_done = self._on_done("warming up", num_warm_up)
        await closed_load(self.client, islice(requests, num_warm_up), options.concurrency, on_done)
        before = await monitored.idle_footprint()
        samples = [(0, before)]
        every = max(total // _SOAK_SAMPLES, 1)

        def watch(done: int) -> None:
            self.on_progress("soaking", done, total)
            if done % every == 0:
                samples.append((done, monitored.footprint()))

        soaking = until_interrupted(islice(requests, total))
        self._record("soak", *await closed_load(self.client, soaking, options.concurrency, watch))
        after = await monitored.idle_footprint()
        return {
            "num_requests": len(self.outcomes["soak"]),
            "num_warm_up": num_warm_up,
            "before": before,
            "after": after,
            "samples": samples,
            "growth": after["resident_bytes"] / before["resident_bytes"] - 1,
        }

    async def _load(self, name: str, times: list[float] | None = None) -> Row:
        """An open load with a request at each of `times`, or a closed one."""
        total = self.options.num_requests if times is None else len(times)
        requests, on_done = until_interrupted(self.requests(total)), self._on_done(name, total)
        if times is None:
            return self._record(name, *await closed_load(self.client, requests, self.options.concurrency, on_done))
        return self._record(name, *await open_load(self.client, requests, times, on_done), is_open=True)

    def _on_done(self, what: str, total: int) -> OnDone:
        return lambda done: self.on_progress(what, done, total)

    def requests(self, count: int) -> Iterator[LoadRequest]:
        """`count` requests, each with the next clip."""
        options = self.options
        for _ in range(count):
            yield LoadRequest(clip=next(self.clips), max_tokens=options.max_tokens, num_frames=options.num_frames)

    def _record(self, name: str, outcomes: list[RequestOutcome], duration_s: float, *, is_open: bool = False) -> Row:
        self.outcomes[name] = outcomes
        self.loads.append(load_result(name, outcomes, duration_s, self.options, is_open=is_open))
        return self.loads[-1]


@dataclass(frozen=True, slots=True)
class MonitoredServer:
    """A server of our own, whose resources are counted as the kernel reports them, and the folder of its uploads."""

    server: LocalServer
    upload_dir: Path

    def footprint(self) -> Row:
        """Of the server process and its descendants; one that has exited or cannot be inspected counts as 0.

        Memory that processes share is counted in each of them, so only differences of resident memory mean something.
        """
        root = psutil.Process(self.server.process.pid)
        processes = [root, *root.children(recursive=True)]
        return {
            "resident_bytes": _sum(processes, lambda process: process.memory_info().rss),
            "num_processes": len(processes),
            "num_descriptors": _sum(processes, lambda process: process.num_fds()),
            "num_files": sum(path.is_file() for path in self.upload_dir.rglob("*")),  # uploads
        }

    async def idle_footprint(self) -> Row:
        """The footprint once uploads are gone and _STEADY figures no longer change, or after a timeout.

        Raises ConfigError if the server has exited.
        """
        self.server.check()
        found = self.footprint()
        for _ in range(round(_IDLE_TIMEOUT_S / _POLL_S)):
            await asyncio.sleep(_POLL_S)
            self.server.check()
            earlier, found = found, self.footprint()
            if found["num_files"] == 0 and all(earlier[key] == found[key] for key in _STEADY):
                break
        return found


def _sum(processes: Sequence[psutil.Process], figure: Callable[[psutil.Process], int]) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += figure(process)
    return total


@contextmanager
def monitored_server(flags: Sequence[str]) -> Iterator[MonitoredServer]:
    """Run a server with these flags until the block ends; raises ConfigError as `local_server` does."""
    with (
        tempfile.TemporaryDirectory(prefix="vidspec-bench-") as folder,
        local_server([*flags, "--upload-dir", folder]) as server,
    ):
        yield MonitoredServer(server, Path(folder))
