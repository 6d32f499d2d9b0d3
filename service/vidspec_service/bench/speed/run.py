"""The run of `bench speed`: each prompt goes through all modes, in rotating order, before the next prompt.

Afterwards messages and forwards are timed on their own, for the speed model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from vidspec_models.request import GenerationRequest
from vidspec_service.bench.common.child import Child
from vidspec_service.bench.common.environment import target_only_config
from vidspec_service.bench.common.generation import StockModel, generate_sample, generate_stock_sample, new_engine
from vidspec_service.bench.common.loops import rounds
from vidspec_service.bench.common.report import OnProgress
from vidspec_service.bench.common.samples import Interval, Sample
from vidspec_service.bench.speed.activity import ForwardSpan, WorkerActivity
from vidspec_service.bench.speed.costs import ProbedCosts, measure_round_trip, probe_costs, typical_context
from vidspec_service.bench.speed.options import Mode, SpeedOptions
from vidspec_service.bench.speed.synthetic import RANDOM_ROWS, RandomPair, phases
from vidspec_service.engine.cgroups import num_cores
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.workers import worker_configs
from vidspec_service.errors import ConfigError

_ROWS = (1, 2, 5, 9, 17)  # row counts at which the target's forwards are timed
_WARM_UP_PROMPTS = 2
_SHOWN_TOKENS = 40


Backend = Callable[[GenerationRequest], Awaitable[Sample]]  # one way to answer requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All measurements. `activities` has an entry for every mode that an engine served."""

    samples: Sequence[Sample]
    activities: Mapping[Mode, WorkerActivity]
    round_trip: Mapping[str, float]
    costs: ProbedCosts

    def of(self, mode: Mode) -> list[Sample]:
        return [sample for sample in self.samples if sample.mode == mode]

    def lanes(self, mode: Mode) -> tuple[dict[str, Sequence[ForwardSpan]], Interval]:
        """Both workers' spans, and the decoding interval of the mode's first answer of _SHOWN_TOKENS tokens or more."""
        samples, activity = self.of(mode), self.activities[mode]
        shown = next((sample for sample in samples if len(sample.ids) >= _SHOWN_TOKENS), samples[0])
        return {role: activity.spans(role) for role in ("draft", "target")}, shown.decode_interval


def measure_speed(options: SpeedOptions, pair: EngineConfig, on_progress: OnProgress) -> Measurements:
    """Run the benchmark on `pair`; for random models only its devices and types are used, not its model names.

    Raises ConfigError and EngineError.
    """
    with TemporaryDirectory(prefix="vidspec-random-") as folder:
        random = RandomPair(Path(folder), options) if options.is_synthetic else None
        pair = random.replace_models(pair) if random else pair
        run = asyncio.run(compare(options, pair, on_progress, random))
        on_progress("timing the channel", 0, 0)
        round_trip = measure_round_trip()
        on_progress("timing forwards", 0, 0)
        rows = RANDOM_ROWS if options.is_synthetic else _ROWS
        costs = probe_costs(pair, typical_context(run.samples), rows, with_copies=options.is_synthetic)
    return Measurements(samples=run.samples, activities=run.activities, round_trip=round_trip, costs=costs)


async def compare(
    options: SpeedOptions, pair: EngineConfig, on_progress: OnProgress, random: RandomPair | None = None
) -> Run:
    """For each phase, start what its modes need, warm up, measure and stop it. Only random models need several phases.

    Raises ConfigError and EngineError.
    """
    if pair.draft is None and any(mode.needs_draft for mode in options.modes):
        raise ConfigError("serial, parallel and auto need a draft model: name one with --draft-model")
    run = Run(options, on_progress)
    for modes in phases(options.modes) if random else [options.modes]:
        async with AsyncExitStack() as stack:
            await run.start_backends(stack, modes, pair)
            await run.measure(modes)
        if random:
            random.write_references(run.samples)
    run.samples = [sample for sample in run.samples if sample.prompt < run.options.num_prompts]
    return run


@dataclass(slots=True)
class Run:
    """The backends that are running, and the measurements of all phases so far."""

    options: SpeedOptions
    on_progress: OnProgress
    backends: dict[Mode, Backend] = field(default_factory=dict)
    activities: dict[Mode, WorkerActivity] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    async def start_backends(self, stack: AsyncExitStack, modes: Sequence[Mode], pair: EngineConfig) -> None:
        """Start a process for `hf`, an engine for `off` and one for the speculating modes, one after the other."""
        self.backends.clear()
        if Mode.HF in modes:
            self.on_progress("loading stock transformers", 0, 0)
            child = stack.enter_context(Child(StockModel, pair.target.spec("target"), num_cores()))
            self.backends[Mode.HF] = partial(generate_stock_sample, child)
        alone, speculating = set(modes) & {Mode.OFF}, [mode for mode in modes if mode.needs_draft]
        for config, wanted in ((target_only_config(pair), alone), (pair, speculating)):
            if not wanted:
                continue
            self.on_progress(f"loading the engine of {', '.join(wanted)}", 0, 0)
            activity = WorkerActivity(worker_configs(config))
            engine = await stack.enter_async_context(new_engine(config, on_heartbeat=activity.record))
            self.backends.update(dict.fromkeys(wanted, partial(generate_sample, engine)))
            self.activities.update(dict.fromkeys(wanted, activity))

    async def measure(self, modes: Sequence[Mode]) -> None:
        """Warm up, then go through the prompts."""
        options, samples = self.options, list[Sample]()
        for prompt in range(options.num_prompts, options.num_prompts + _WARM_UP_PROMPTS):
            for mode in modes:
                self.on_progress(f"warming up {mode}", 0, 0)
                await self._answer(mode, -1, [prompt])
        for (group, prompts), mode in rounds(enumerate(_groups(options)), modes):
            self.on_progress(f"answering in mode {mode}", len(samples), options.num_prompts * len(modes))
            samples += await self._answer(mode, group, prompts)
        for mode in self.activities.keys() & set(modes):
            await self.activities[mode].wait_for(max(each.last for each in samples if each.mode == mode))
        self.samples += samples
        # Ctrl-C may have ended the loop before: what follows, and the report, is about the same prompts.
        self.options = replace(options, num_prompts=len({sample.prompt for sample in samples}))

    async def _answer(self, mode: Mode, group: int, prompts: Sequence[int]) -> list[Sample]:
        """One group in one mode, `concurrency` requests at a time."""
        gate = asyncio.Semaphore(self.options.concurrency)

        async def answer(prompt: int, request: GenerationRequest) -> Sample:
            async with gate:
                return replace(await self.backends[mode](request), mode=mode, group=group, prompt=prompt)

        requests = [self.options.request(mode, group, prompt) for prompt in prompts]  # rendered before any is timed
        return await asyncio.gather(*map(answer, prompts, requests))  # its first error is raised as it is


def _groups(options: SpeedOptions) -> Iterator[range]:
    """Groups of prompts; one mode answers a whole group before the next mode does.

    With one request at a time, a group is one prompt. With more, a group is 3 times `concurrency`: a group of only
    `concurrency` requests would mostly measure its last answer, which runs alone.
    """
    size = 1 if options.concurrency == 1 else 3 * options.concurrency
    for first in range(0, options.num_prompts, size):
        yield range(first, min(first + size, options.num_prompts))
