"""`vidspec check --device`: what a device can do, in a minute or two, with a random pair of a released pair's shape.

One engine answers a few prompts in every mode (are the ids the same?). Then each model's forwards are timed alone on
an otherwise idle device and compared with a large copy (how near is a step to the memory bandwidth?). From these, the
speed model predicts the speed-up at several acceptance rates. Weights are random, so no acceptance rate is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from vidspec_models.step_path import StepPath
from vidspec_models.synthetic.recipe import SHAPES
from vidspec_service.bench.common.child import call_in_child
from vidspec_service.bench.common.environment import threads_of
from vidspec_service.bench.common.generation import generate_sample, new_engine
from vidspec_service.bench.common.report import OnProgress, Row
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.speed.costs import ForwardTimes, fitted_costs, time_forwards, typical_context
from vidspec_service.bench.speed.identity import find_forks
from vidspec_service.bench.speed.options import BASELINE, Mode, SpeedOptions
from vidspec_service.bench.speed.synthetic import RANDOM_ROWS, RandomPair, roofline
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.interface import EngineInfo
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.frontend.supervisor import WorkerLauncher
from vidspec_service.engine.frontend.workers import share_gpu, worker_configs
from vidspec_service.engine.speculation.plan import best_plan

ACCEPTANCES = (0.7, 0.8, 0.9)
_LATENCY_S = 0.0002  # of a message between the workers; `bench speed` measures it
_MODES = (BASELINE, Mode.SERIAL, Mode.PARALLEL)
_NUM_PROMPTS, _MAX_TOKENS = 3, 48
_ROOM = 1.3  # memory over that of 16-bit weights: also holds the KV cache, activations and the driver
# From the largest pair to the one for the smallest memory.
_PAIRS = (
    "llava-onevision-7b+0.5b",
    "llava-onevision-7b-of-14-layers+0.5b",
    "llava-onevision-7b-of-4-layers+0.5b",
    "small",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Results of the check. Times are of one model alone."""

    shape: str
    info: EngineInfo
    step_paths: Mapping[str, StepPath]
    num_answers: int
    forks: Sequence[Row]  # answers that differ from those of the target alone
    forwards: Mapping[str, ForwardTimes]
    rooflines: Mapping[str, Row]
    take_turns: bool  # the models, on one GPU
    speedups: Mapping[float, float]  # acceptance rate -> predicted speed-up over the target alone


def fitting_pair(target_bytes: int, draft_bytes: int | None = None) -> str:
    """The largest pair that fits in 16 bits, else the smallest; without `draft_bytes` both models share one device."""

    def fits(name: str) -> bool:
        target, draft = (_ROOM * 2 * shape.parameters() for shape in (SHAPES[name].target, SHAPES[name].draft))
        if draft_bytes is None:
            return target + draft <= target_bytes
        return target <= target_bytes and draft <= draft_bytes

    return next((name for name in _PAIRS if fits(name)), _PAIRS[-1])


async def measure_device(
    pair: EngineConfig, shape: str, on_progress: OnProgress, launcher: WorkerLauncher | None = None
) -> DeviceFacts:
    """Check the devices of `pair`, whose models are replaced by random ones. Raises ConfigError and EngineError."""
    options = SpeedOptions(
        num_prompts=_NUM_PROMPTS, modes=_MODES, max_tokens=_MAX_TOKENS, is_synthetic=True, shape=shape
    )
    with TemporaryDirectory(prefix="vidspec-random-") as folder:
        made = RandomPair(Path(folder), options)
        pair = made.replace_models(pair)
        on_progress(f"loading {shape}", 0, 0)
        async with new_engine(pair, launcher=launcher) as engine:
            samples = await _answers(engine, options, made, on_progress)
            info, step_paths = engine.info, engine.status().step_paths
        context, threads = typical_context(samples), threads_of(pair)
        forwards, rooflines = {}, {}
        for role, worker in worker_configs(pair).items():
            on_progress(f"timing the {role}", 0, 0)
            spec, rows = worker.spec(role), RANDOM_ROWS if role == "target" else (1,)
            forwards[role] = call_in_child(time_forwards, spec, threads[role], context, rows, with_copies=True)
            rooflines[role] = roofline(getattr(SHAPES[shape], role), forwards[role], context)
    take_turns = share_gpu(forwards["target"].device, forwards["draft"].device)
    return DeviceFacts(
        shape=shape,
        info=info,
        step_paths=step_paths,
        num_answers=len(samples),
        forks=find_forks(samples, BASELINE),
        forwards=forwards,
        rooflines=rooflines,
        take_turns=take_turns,
        speedups=expected_speedups(forwards["target"], forwards["draft"], overlap=not take_turns),
    )


def expected_speedups(target: ForwardTimes, draft: ForwardTimes, *, overlap: bool) -> dict[float, float]:
    """Predicted speed-up over the target alone, by the speed model of `engine/speculation/plan.py`."""
    costs = fitted_costs(target.seconds.items(), draft.seconds[1], _LATENCY_S)
    costs = replace(costs, stride_s=target.token_s)
    return {each: best_plan(each, costs, overlap=overlap, least_gain=0.0).speedup for each in ACCEPTANCES}


async def _answers(
    engine: LocalEngine, options: SpeedOptions, made: RandomPair, on_progress: OnProgress
) -> list[Sample]:
    """Answer every prompt in every mode. The target alone comes first: the draft's oracle proposes from its answers."""
    samples = list[Sample]()
    for mode in options.modes:
        for prompt in range(options.num_prompts):
            on_progress(f"answering in mode {mode}", len(samples), options.num_prompts * len(options.modes))
            sample = await generate_sample(engine, options.request(mode, 0, prompt))
            samples.append(replace(sample, mode=mode, prompt=prompt))
        if mode is BASELINE:
            made.write_references(samples)
    return samples
