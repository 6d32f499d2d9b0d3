"""`bench speed` from options to report: compare the modes, then time the channel and the models on their own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from vidspec_service.bench.aggregation import Aggregation
from vidspec_service.bench.comparison import Comparison, compare
from vidspec_service.bench.costs import Forwards, ProbedCosts
from vidspec_service.bench.facts import hardware, load_average, now, versions
from vidspec_service.bench.identity import Fork, find_forks, reference_mode
from vidspec_service.bench.options import Mode, SpeedOptions
from vidspec_service.bench.probes import probe_costs
from vidspec_service.bench.report import ModelFacts, SampleFacts, SpeedReport, baseline_text
from vidspec_service.bench.roofline import SyntheticFacts
from vidspec_service.bench.round_trip import RoundTrip, measure_round_trip
from vidspec_service.bench.samples import Sample
from vidspec_service.bench.tell import Tell
from vidspec_service.engine.types import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that was seen; the timeline is drawn from it, too."""

    comparison: Comparison
    round_trip: RoundTrip
    costs: ProbedCosts
    started: Started
    synthetic: SyntheticFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Of the moment before anything was measured."""

    time: str
    versions: dict[str, str]
    load_average: float

    @classmethod
    def now(cls) -> Started:
        return cls(time=now(), versions=versions(), load_average=load_average())


def measure_speed(options: SpeedOptions, pair: EngineConfig, tell: Tell) -> Measurements:
    """`pair` is the engine with its draft. Raises ConfigError and EngineError."""
    started = Started.now()
    comparison = asyncio.run(compare(options, pair, tell))
    tell("timing the channel", 0, 0)
    round_trip = measure_round_trip()
    tell("timing forwards", 0, 0)
    costs = probe_costs(pair, typical_context(comparison.samples))
    return Measurements(comparison=comparison, round_trip=round_trip, costs=costs, started=started)


def typical_context(samples: Sequence[Sample]) -> int:
    """Rows in the cache half-way through a mean answer: what a forward attends to."""
    return round(fmean(sample.prompt_tokens + len(sample.ids) / 2 for sample in samples))


def build_report(options: SpeedOptions, pair: EngineConfig, measured: Measurements, command: str) -> SpeedReport:
    """Measurements in the words of the report."""
    costs, samples = measured.costs, measured.comparison.samples
    forks = tuple(find_forks(samples, reference_mode(options.modes)))
    aggregation = Aggregation(measured.comparison, costs, measured.round_trip.p50_s, options.concurrency)
    return SpeedReport(
        created=measured.started.time,
        command=command,
        baseline=baseline_text(costs.alone.threads),
        hardware=hardware(accelerators(costs)),
        versions=measured.started.versions,
        models=_models(pair, costs),
        prompts=options.num_prompts,
        task=options.task,
        max_tokens=options.max_tokens,
        sampling=options.sampling,
        concurrency=options.concurrency,
        modes={mode: aggregation.result(mode) for mode in options.modes},
        cost_ratio=costs.cost_ratio,
        costs=costs,
        channel_round_trip=measured.round_trip,
        identical=is_identical(options, forks),
        identical_to_hf=is_identical_to_hf(options, forks),
        forks=forks,
        idle_workers_cpu=measured.comparison.idle_workers_cpu,
        load_average_before=measured.started.load_average,
        samples=tuple(SampleFacts.of(sample) for sample in samples),
        synthetic=measured.synthetic,
    )


def is_identical(options: SpeedOptions, forks: Sequence[Fork]) -> bool | None:
    """Did the engine's modes agree? None if there was nothing to compare."""
    if len([mode for mode in options.modes if mode is not Mode.HF]) < 2:
        return None
    return all(fork.mode is Mode.HF for fork in forks)


def is_identical_to_hf(options: SpeedOptions, forks: Sequence[Fork]) -> bool | None:
    """Did `hf` agree with the engine? Of greedy answers only: when sampling, transformers draws by itself."""
    if Mode.HF not in options.modes or len(options.modes) < 2 or options.sampling.temperature > 0:
        return None
    return not any(fork.mode is Mode.HF for fork in forks)


def accelerators(costs: ProbedCosts) -> dict[str, str]:
    """Device to product name; empty on a machine without."""
    found = [costs.target, costs.alone, *([costs.draft] if costs.draft else [])]
    return {forwards.device: forwards.device_name for forwards in found if forwards.device_name}


def _models(pair: EngineConfig, costs: ProbedCosts) -> dict[str, ModelFacts]:
    alone = _model(pair.target.model, costs.alone)
    models = {
        "target": _model(pair.target.model, costs.target),
        "off": alone,
        "hf": replace(alone, threads=len(os.sched_getaffinity(0)), rows_are_invariant=None),
    }
    if pair.draft is not None and costs.draft is not None:
        models["draft"] = _model(pair.draft.model, costs.draft)
    return models


def _model(name: str, forwards: Forwards) -> ModelFacts:
    return ModelFacts(
        model=name,
        device=forwards.device,
        dtype=forwards.dtype,
        threads=forwards.threads,
        rows_are_invariant=forwards.rows_are_invariant,
    )
