"""`bench speed` from options to report: compare the modes, then time the channel and the models on their own."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from statistics import fmean

from vidspec_service.bench.activity import Activity
from vidspec_service.bench.aggregation import Aggregation
from vidspec_service.bench.comparison import Comparison, Tell, compare
from vidspec_service.bench.costs import ProbedCosts
from vidspec_service.bench.facts import hardware, load_average, now, versions
from vidspec_service.bench.identity import Fork, find_forks, reference_mode
from vidspec_service.bench.options import Mode, SpeedOptions
from vidspec_service.bench.probes import probe_costs
from vidspec_service.bench.report import SpeedReport, baseline_text
from vidspec_service.bench.round_trip import RoundTrip, measure_round_trip
from vidspec_service.bench.samples import Sample
from vidspec_service.engine.types import EngineConfig, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRun:
    """A report, and the traces that a timeline is drawn from."""

    report: SpeedReport
    activities: dict[Mode, Activity]


def run_speed(options: SpeedOptions, pair: EngineConfig, command: str, tell: Tell) -> SpeedRun:
    """Measure everything. `pair` is the engine with its draft. Raises ConfigError and EngineError."""
    load_before = load_average()
    comparison = asyncio.run(compare(options, pair, tell))
    tell("timing the channel", 0, 0)
    round_trip = measure_round_trip()
    tell("timing forwards", 0, 0)
    costs = probe_costs(pair, typical_context(comparison.samples))
    report = _report(options, pair, comparison, costs, round_trip, command, load_before)
    return SpeedRun(report=report, activities=dict(comparison.activities))


def typical_context(samples: tuple[Sample, ...]) -> int:
    """Rows in the cache half-way through a mean answer: what a forward attends to."""
    return round(fmean(sample.prompt_tokens + len(sample.ids) / 2 for sample in samples))
