"""`bench pruning` from options to report: the draft in every configuration, a long clip that is timed, the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from vidspec_models.bundled.scene import TEST_SEEDS
from vidspec_models.preservation.selection import CellSelector
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.prompt import pruned
from vidspec_models.request import Preservation, SpeculationMode
from vidspec_service.bench.common.environment import Placement
from vidspec_service.bench.common.generation import generate_sample, new_engine
from vidspec_service.bench.common.loops import until_interrupted
from vidspec_service.bench.common.report import OnProgress, Report, Row
from vidspec_service.bench.common.samples import Sample, decode_rate
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, about_video, scene_request, scene_video
from vidspec_service.bench.pruning.options import PruningConfig, PruningOptions, PruningTask, clip_prompts
from vidspec_service.bench.pruning.report import Speed, pruning_report, results
from vidspec_service.bench.pruning.teacher_forcing import (
    ForcedAnswer,
    LoadedPair,
    laws_of,
    prefill,
    pruning_configs,
    target_answer,
    teacher_force,
)
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.workers import worker_configs
from vidspec_service.engine.speculation.plan import StepCosts, best_plan
from vidspec_service.engine.speculation.probe import measure_costs

T = TypeVar("T")

_REPEATS = 5
_WARM_UP = 2
_SHOWN = Preservation.HIPPO


def measure_long_clip(models: LoadedPair, options: PruningOptions) -> Row:
    """Medians of a few runs on the caption of one clip, with more frames than the bundled pair was made for.

    Every part is timed on its own, so that none waits for another.

    Keys of `selection_s` are strategies, hippo always among them; keys of `draft_prefill_s` are ratios.
    `scoring_over_prefill` is the time of relevance (on the target) and hippo's choice (on the draft) over the target's
    prefill time; `draft_prefill_ratio` is the draft's prefill time at the largest ratio up to 0.9 over that of ratio 0.
    """
    inputs = about_video(CAPTION_PROMPT), (scene_video(TEST_SEEDS[0], options.long_frames),)
    target, law = models.run_as("target"), STRATEGIES[_SHOWN].relevance
    assert law is not None
    target_prepare_s, prompt = _timed(lambda: target.prepare(*inputs), 2)
    runs = [prefill(target, prompt, models.chunk, 0, is_observed=True) for _ in range(_REPEATS)]
    target_prefill_s = median(run.seconds for run in runs)
    relevance_s, relevance = _timed(lambda: runs[-1].relevance(law))

    draft = models.run_as("draft")
    draft_prepare_s, full_prompt = _timed(lambda: draft.prepare(*inputs), 2)

    def kept(strategy: Preservation) -> Tensor:
        return CellSelector(STRATEGIES[strategy], 0.9, full_prompt).kept(relevance)

    timed = dict.fromkeys((*options.strategies, _SHOWN))
    selection_s = {strategy.value: _timed(partial(kept, strategy))[0] for strategy in timed}
    ratios = sorted({0.0, *options.ratios})
    prefills = {}
    for ratio in ratios:
        seen = pruned(full_prompt, CellSelector(STRATEGIES[_SHOWN], ratio, full_prompt).kept())
        prefills[ratio] = median(prefill(draft, seen, models.chunk, 0).seconds for _ in range(_REPEATS))
    shown = max(ratio for ratio in ratios if ratio <= 0.9)
    choice_s = selection_s[_SHOWN.value]
    return {
        "frames": options.long_frames,
        "video_tokens": prompt.num_video_tokens,
        "target_prepare_s": target_prepare_s,
        "target_prefill_s": target_prefill_s,
        "draft_prepare_s": draft_prepare_s,
        "relevance_s": relevance_s,
        "scoring_over_prefill": (relevance_s + choice_s) / target_prefill_s,
        "selection_s": selection_s,
        "draft_prefill_s": {f"{ratio:g}": seconds for ratio, seconds in prefills.items()},
        "draft_prefill_ratio": prefills[shown] / prefills[0.0],
        "time_line": time_line(
            first_token_s=target_prepare_s + target_prefill_s,
            relevance_s=relevance_s,
            draft_prepare_s=draft_prepare_s,
            choice_s=choice_s,
            draft_prefill_s=prefills[shown],
        ),
    }


def time_line(
    *, first_token_s: float, relevance_s: float, draft_prepare_s: float, choice_s: float, draft_prefill_s: float
) -> dict[str, float]:
    """Seconds after both workers start on the request; the target measures relevance after its first token.

    The draft is `ready` when it can propose after pruning with its own scores, and `refined` after prefilling again
    with the rows that the target's scores chose. The last entry is for a draft that waits for the target's scores.
    """
    scores_s = first_token_s + relevance_s
    ready_s = draft_prepare_s + choice_s + draft_prefill_s
    return {
        "target_first_token_s": first_token_s,
        "relevance_s": scores_s,
        "draft_ready_s": ready_s,
        "draft_refined_s": max(ready_s, scores_s) + choice_s + draft_prefill_s,
        "draft_ready_if_it_waited_s": max(draft_prepare_s, scores_s) + choice_s + draft_prefill_s,
    }


def _timed(work: Callable[[], T], repeats: int = _REPEATS) -> tuple[float, T]:
    """Median seconds, and the result of the last repeat."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        done = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds), done


def speeds(models: LoadedPair, engine: Mapping[PruningConfig, float | None]) -> Speed:
    """Tokens per second: measured in the engine if it was run (captions), else predicted by the policy's speed model.

    Forwards of both models are timed in this process, one model after the other.
    """
    target, draft = measure_costs(models.run_as("target")), measure_costs(models.run_as("draft"))
    costs = StepCosts(base_s=target.base_s, row_s=target.row_s, draft_s=draft.base_s + draft.row_s)

    def speed(config: PruningConfig, task: str, acceptance: float) -> tuple[float | None, str]:
        if task == PruningTask.CAPTION and config in engine:
            return engine[config], "engine"
        plan = best_plan(acceptance, costs, overlap=True, least_gain=0.0)
        return plan.speedup / costs.verification_s(1), "speed model"

    return speed


def engine_speeds(
    options: PruningOptions, pair: EngineConfig, configs: Sequence[PruningConfig], on_progress: OnProgress
) -> dict[PruningConfig, float | None]:
    """Decoding speed of captions in mode parallel, without each answer's first tokens; one engine after another."""
    found = {}
    for index, config in enumerate(until_interrupted(configs)):
        on_progress(f"engine: {config.strategy} at {config.ratio:g}", index, len(configs))
        engine_config = replace(
            pair,
            preservation=config.strategy,
            prune_ratio=config.prune_ratio,
            speculation=SpeculationMode.PARALLEL,
        )
        found[config] = asyncio.run(_engine_speed(options, engine_config))
    return found


async def _engine_speed(options: PruningOptions, config: EngineConfig) -> float | None:
    samples: list[Sample] = []
    async with new_engine(config) as engine:
        for clip in range(-_WARM_UP, options.num_clips):
            request = scene_request(f"pruning-{clip}", clip, options.max_tokens)
            sample = await generate_sample(engine, replace(request, speculation=config.speculation))
            samples += [replace(sample, group=clip)] if clip >= 0 else []
    return decode_rate(samples)


def measure_pruning(options: PruningOptions, pair: EngineConfig, on_progress: OnProgress) -> Report:
    """Raises ConfigError."""
    on_progress("loading both models", 0, 0)
    models = LoadedPair(pair)
    configs = list(pruning_configs(options))
    found: list[ForcedAnswer] = []
    for clip in until_interrupted(range(options.num_clips)):
        on_progress("judging", clip, options.num_clips)
        for clip_prompt in clip_prompts(clip, options.tasks):
            answer = target_answer(models, clip_prompt, laws_of(configs), options.max_tokens)
            found += teacher_force(models, clip_prompt, answer, configs, options.seed)
    options = replace(options, num_clips=clip + 1)
    on_progress("timing a long clip", 0, 0)
    long_clip = measure_long_clip(models, options)
    speed = speeds(models, engine_speeds(options, pair, configs, on_progress) if options.use_engine else {})
    placements = {role: Placement.of(models.run_as(role)) for role in ("target", "draft")}
    workers = worker_configs(pair).items()
    facts = {role: placements[role].facts(worker.model, models.threads[role]) for role, worker in workers}
    rows = results(options, found, speed)
    return pruning_report(options, rows, long_clip, facts, list(placements.values()))
