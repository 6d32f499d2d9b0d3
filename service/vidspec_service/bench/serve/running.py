"""`bench serve` from options to report: one load, an overload after its capacity was measured, or a soak."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack

from vidspec_service.bench.facts import hardware, load_average, now, versions
from vidspec_service.bench.serve.clips import endless, render_clips
from vidspec_service.bench.serve.exchange import Asker, Outcome, Question
from vidspec_service.bench.serve.load import closed_load, open_load, poisson_times
from vidspec_service.bench.serve.options import ServeOptions
from vidspec_service.bench.serve.report import ServeReport
from vidspec_service.bench.serve.server import Server, own_server
from vidspec_service.bench.serve.soak import SoakResult, soak
from vidspec_service.bench.serve.statistics import LoadResult, load_result
from vidspec_service.bench.tell import Tell

_WARM_UP = 2
_GRACE_S = 30.0  # a client waits so much longer than the server's deadline


async def run_load(
    options: ServeOptions, url: str | None, flags: list[str], api_key: str | None, command: str, tell: Tell
) -> ServeReport:
    """Against `url`, or a server started with `flags`. Raises ConfigError if that does not start."""
    created, load = now(), load_average()
    if options.clips:
        clips = [path.read_bytes() for path in options.clips]
    else:
        tell("rendering clips", 0, 0)
        clips = render_clips(options.num_clips, is_mixed=options.soak is not None)
    async with AsyncExitStack() as stack:
        server = None
        if url is None:
            tell("starting a server", 0, 0)
            server = await stack.enter_async_context(own_server(flags))
        address = server.url if server else url or ""
        asker = await stack.enter_async_context(Asker(address, options.deadline_s + _GRACE_S, api_key))
        model = await asker.model()  # before minutes of load: a server that is not there, or wants another key
        run = _Run(options, asker, endless(clips, is_repeated=options.has_repeated_files), tell)
        await run.warm_up()
        results, soaked = await run.measure(server)
    return ServeReport(
        created=created,
        command=command,
        hardware=hardware({}),
        versions=versions(),
        model=model,
        server="its own" if server else address,
        settings=_settings(options),
        loads=tuple(results),
        soak=soaked,
        outcomes={result.name: tuple(outcomes) for result, outcomes in run.outcomes},
        load_average_before=load,
    )


class _Run:
    """One measurement of a server that is up."""

    def __init__(self, options: ServeOptions, asker: Asker, clips: Iterator[bytes], tell: Tell) -> None:
        self.outcomes = list[tuple[LoadResult, list[Outcome]]]()
        self._options = options
        self._asker = asker
        self._clips = clips
        self._tell = tell

    async def warm_up(self) -> None:
        await closed_load(
            self._asker, self._questions(_WARM_UP), 1, lambda done: self._tell("warming up", done, _WARM_UP)
        )

    async def measure(self, server: Server | None) -> tuple[list[LoadResult], SoakResult | None]:
        options = self._options
        if options.soak is not None:
            assert server is not None
            outcomes, duration_s, soaked = await soak(self._asker, server, self._clips, options, self._tell)
            return [self._result("soak", outcomes, duration_s)], soaked
        if options.overload is not None:
            capacity = await self._closed("capacity")
            rate = options.overload * max(capacity.answered_per_s, 1e-3)
            times = poisson_times(rate, random.Random(options.seed), until_s=options.duration_s)
            return [capacity, await self._open(f"{options.overload:g}x overload", times)], None
        if options.rate is not None:
            times = poisson_times(options.rate, random.Random(options.seed), count=options.num_requests)
            return [await self._open(f"open, {options.rate:g} a second", times)], None
        return [await self._closed(f"closed, {options.concurrency} at once")], None

    async def _closed(self, name: str) -> LoadResult:
        total = self._options.num_requests
        questions = self._questions(total)
        told = lambda done: self._tell(name, done, total)  # noqa: E731
        return self._result(name, *await closed_load(self._asker, questions, self._options.concurrency, told))

    async def _open(self, name: str, times: list[float]) -> LoadResult:
        questions = self._questions(len(times))
        told = lambda done: self._tell(name, done, len(times))  # noqa: E731
        return self._result(name, *await open_load(self._asker, questions, times, told))

    def _questions(self, count: int) -> Iterator[Question]:
        options = self._options
        for _ in range(count):
            yield Question(clip=next(self._clips), max_tokens=options.max_tokens, num_frames=options.num_frames)

    def _result(self, name: str, outcomes: list[Outcome], duration_s: float) -> LoadResult:
        options = self._options
        result = load_result(
            name,
            outcomes,
            duration_s,
            slo_ttft_s=options.slo_ttft_s,
            slo_tpot_s=options.slo_tpot_s,
            deadline_s=options.deadline_s,
        )
        self.outcomes.append((result, outcomes))
        return result


def _settings(options: ServeOptions) -> Mapping[str, float | int | bool | None]:
    """What the figures depend on."""
    return {
        "max_tokens": options.max_tokens,
        "num_frames": options.num_frames,
        "clips": len(options.clips) or options.num_clips,
        "repeated_files": options.has_repeated_files,
        "slo_ttft_s": options.slo_ttft_s,
        "slo_tpot_s": options.slo_tpot_s,
        "deadline_s": options.deadline_s,
        "seed": options.seed,
    }
