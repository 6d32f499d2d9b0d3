"""`bench pruning` from options to report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vidspec_service.bench.facts import hardware, load_average, now, versions
from vidspec_service.bench.pruning.aggregation import WINDOW, results
from vidspec_service.bench.pruning.asking import asked_about
from vidspec_service.bench.pruning.following import Followed, by_third, followed
from vidspec_service.bench.pruning.judging import (
    Judged,
    LoadedPair,
    answered,
    judged,
    laws_of,
    settings_of,
)
from vidspec_service.bench.pruning.options import PruningOptions, Task
from vidspec_service.bench.pruning.overlay import draw_overlays
from vidspec_service.bench.pruning.report import ModelFacts, PruningReport
from vidspec_service.bench.pruning.speeds import Speeds, engine_speeds, probed_costs
from vidspec_service.bench.pruning.timing import measure_long_clip
from vidspec_service.bench.tell import Tell
from vidspec_service.engine.types import EngineConfig

_FOLLOWING_RATIO = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What else is written while measuring."""

    command: str
    overlay: Path | None = None


def measure_pruning(options: PruningOptions, pair: EngineConfig, outputs: Outputs, tell: Tell) -> PruningReport:
    """Judge every setting on every clip, time a long clip, and run the engine if asked to. Raises ConfigError."""
    started, versions_now, load = now(), versions(), load_average()
    tell("loading both models", 0, 0)
    models = LoadedPair(pair)
    settings = list(settings_of(options))
    found: list[Judged] = []
    captions: list[Followed] = []
    for clip in range(options.num_clips):
        tell("judging", clip, options.num_clips)
        for asked in asked_about(clip, options.tasks):
            answer = answered(models, asked, laws_of(settings), options.max_tokens)
            found += judged(models, asked, answer, settings, options.seed)
            if asked.task is Task.CAPTION:
                if options.follow_every is not None:
                    caption = followed(models, asked, answer, options.follow_every, _FOLLOWING_RATIO)
                    captions += [caption] if caption is not None else []
                if outputs.overlay is not None and clip == 0:
                    draw_overlays(models, asked, answer, settings, outputs.overlay)
    tell("timing a long clip", 0, 0)
    long_clip = measure_long_clip(models, options)
    costs = probed_costs(models)
    engine = engine_speeds(options, pair, settings, tell) if options.use_engine else {}
    return PruningReport(
        created=started,
        command=outputs.command,
        baseline="none: the draft sees every video token (ratio 0)",
        hardware=hardware({}),
        versions=versions_now,
        models=_models(pair, models),
        clips=options.num_clips,
        window=WINDOW,
        max_tokens=options.max_tokens,
        results=results(options, found, Speeds(costs, engine)),
        long_clip=long_clip,
        following=by_third(captions) if captions else (),
        following_every=options.follow_every,
        load_average_before=load,
    )


def _models(pair: EngineConfig, models: LoadedPair) -> dict[str, ModelFacts]:
    facts = {}
    for role, worker in (("target", pair.target), ("draft", pair.draft)):
        assert worker is not None
        geometry = models.run_as(role).decoder.geometry
        facts[role] = ModelFacts(
            model=worker.model,
            device=geometry.device_names,
            dtype=str(geometry.dtype).removeprefix("torch."),
            threads=models.threads[role],
        )
    return facts
