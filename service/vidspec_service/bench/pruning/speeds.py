"""Tokens per second of a setting: from runs of the engine, or from the speed model at the measured acceptance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry

from vidspec_service.bench.contenders import EngineContender, Turn
from vidspec_service.bench.options import Mode, SpeedOptions
from vidspec_service.bench.options import Task as Question
from vidspec_service.bench.prompts import make_prompts
from vidspec_service.bench.pruning.judging import LoadedPair, Setting
from vidspec_service.bench.pruning.options import PruningOptions, Task
from vidspec_service.bench.samples import Sample, decoding_by_group, total
from vidspec_service.bench.tell import Tell
from vidspec_service.engine.client import EngineClient
from vidspec_service.engine.policy import StepCosts, best_plan, tokens_per_second
from vidspec_service.engine.speculation import measure_costs
from vidspec_service.engine.types import EngineConfig, SpeculationMode
from vidspec_service.telemetry import Metrics

_MOST_ACCEPTANCE = 0.99  # as in the policy: the model has a pole at 1
_WARM_UP = 2


def probed_costs(models: LoadedPair) -> StepCosts:
    """Forwards of both models, timed in this process, one model after the other."""
    target = measure_costs(models.run_as("target"))
    draft = measure_costs(models.run_as("draft"))
    return StepCosts(base_s=target.base_s, row_s=target.row_s, draft_s=draft.base_s + draft.row_s)


def predicted(costs: StepCosts, acceptance: float) -> float:
    """Of mode parallel with the plan that the policy would make."""
    acceptance = min(acceptance, _MOST_ACCEPTANCE)
    plan = best_plan(acceptance, costs, overlap=True, least_gain=0.0)
    return tokens_per_second(acceptance, costs, plan.minimum, plan.window, overlap=True)


def engine_speeds(
    options: PruningOptions, pair: EngineConfig, settings: Sequence[Setting], tell: Tell
) -> dict[Setting, float]:
    """Captions in mode parallel, one engine after another: decoding speed, each answer's first token left out."""
    found = {}
    for index, setting in enumerate(settings):
        tell(f"engine: {setting.strategy} at {setting.ratio:g}", index, len(settings))
        found[setting] = asyncio.run(_engine_speed(options, pair, setting))
    return found


async def _engine_speed(options: PruningOptions, pair: EngineConfig, setting: Setting) -> float:
    config = replace(
        pair,
        preservation=setting.strategy,
        prune_ratio=min(setting.ratio, 0.99),
        speculation=SpeculationMode.PARALLEL,
    )
    asked = SpeedOptions(max_tokens=options.max_tokens)
    samples: list[Sample] = []
    async with EngineClient(config, Metrics(CollectorRegistry())) as engine:
        contender = EngineContender(engine)
        prompts = list(make_prompts(Question.CAPTION, range(options.num_clips)))
        for group, prompt in enumerate([*prompts[:_WARM_UP], *prompts], -_WARM_UP):
            turn = Turn(mode=Mode.PARALLEL, group=group, prompt=prompt)
            sample = await contender.answer(turn, asked)
            samples += [sample] if group >= 0 else []
    return total(decoding_by_group(samples).values()).rate


class Speeds:
    """What `aggregation.results` asks: engine figures where there are any (captions), else predictions."""

    def __init__(self, costs: StepCosts, engine: Mapping[Setting, float]) -> None:
        self._costs = costs
        self._engine = engine

    def __call__(self, setting: Setting, task: str, acceptance: float) -> tuple[float, str]:
        if task == Task.CAPTION and setting in self._engine:
            return self._engine[setting], "engine"
        return predicted(self._costs, acceptance), "speed model"
