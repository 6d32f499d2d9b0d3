"""`bench pruning` from options to report: judge every setting on every clip, time a long clip, run the engine."""

from __future__ import annotations

from pathlib import Path

from vidspec_service.bench.common.facts import Placement
from vidspec_service.bench.common.report import Report, Tell
from vidspec_service.bench.pruning.judging import Judged, LoadedPair, answered, judged, laws_of, settings_of
from vidspec_service.bench.pruning.options import PruningOptions, Task, asked_about
from vidspec_service.bench.pruning.plots import draw_overlays
from vidspec_service.bench.pruning.report import pruning_report, results
from vidspec_service.bench.pruning.timing import engine_speeds, measure_long_clip, speeds
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.workers import worker_configs


def measure_pruning(options: PruningOptions, pair: EngineConfig, overlay: Path | None, tell: Tell) -> Report:
    """`overlay`: a folder for pictures of what is kept of the first clip. Raises ConfigError."""
    tell("loading both models", 0, 0)
    models = LoadedPair(pair)
    settings = list(settings_of(options))
    found: list[Judged] = []
    for clip in range(options.num_clips):
        tell("judging", clip, options.num_clips)
        for asked in asked_about(clip, options.tasks):
            answer = answered(models, asked, laws_of(settings), options.max_tokens)
            found += judged(models, asked, answer, settings, options.seed)
            if overlay is not None and clip == 0 and asked.task is Task.CAPTION:
                draw_overlays(models, asked, answer, settings, overlay)
    tell("timing a long clip", 0, 0)
    long_clip = measure_long_clip(models, options)
    speed = speeds(models, engine_speeds(options, pair, settings, tell) if options.use_engine else {})
    placements = {role: Placement.of(models.run_as(role)) for role in ("target", "draft")}
    workers = worker_configs(pair).items()
    facts = {role: placements[role].facts(worker.model, models.threads[role]) for role, worker in workers}
    rows = results(options, found, speed)
    return pruning_report(options, rows, long_clip, facts, list(placements.values()))
