"""`bench speed` from options to report: compare the modes, then time the channel and the models on their own."""

from __future__ import annotations

import asyncio

from vidspec_service.bench.common.facts import Provenance
from vidspec_service.bench.common.progress import Tell
from vidspec_service.bench.speed.comparison import compare
from vidspec_service.bench.speed.costs import measure_round_trip, probe_costs, typical_context
from vidspec_service.bench.speed.options import SpeedOptions
from vidspec_service.bench.speed.report import Measurements
from vidspec_service.bench.speed.synthetic import measure_synthetic
from vidspec_service.engine.types import EngineConfig


def measure_speed(options: SpeedOptions, pair: EngineConfig, command: str, tell: Tell) -> Measurements:
    """`pair` is the engine with its draft. Raises ConfigError and EngineError."""
    if options.synthetic is not None:
        return measure_synthetic(options, pair, options.synthetic, command, tell)
    provenance = Provenance.now(command)
    comparison = asyncio.run(compare(options, pair, tell))
    tell("timing the channel", 0, 0)
    round_trip = measure_round_trip()
    tell("timing forwards", 0, 0)
    costs = probe_costs(pair, typical_context(comparison.samples))
    return Measurements(comparison=comparison, round_trip=round_trip, costs=costs, provenance=provenance)
