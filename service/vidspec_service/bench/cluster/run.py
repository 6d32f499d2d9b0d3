"""`bench cluster`: measure the times of one engine here, then simulate how many such engines handle each situation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import RenderableType

from vidspec_models.request import GenerationRequest
from vidspec_service.bench.cluster.simulation import EngineTimes, Routing, Scenario, Simulation, SimulationResult
from vidspec_service.bench.common.generation import generate_sample, new_engine
from vidspec_service.bench.common.loops import until_interrupted
from vidspec_service.bench.common.options import number
from vidspec_service.bench.common.report import OnProgress, Plot, Report, Row, column, table
from vidspec_service.bench.common.samples import decode_rate, median_ttft_s
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, scene_request
from vidspec_service.engine.config import EngineConfig
from vidspec_service.errors import ConfigError

NUMBERS = (1, 2, 4, 8, 16)  # numbers of answers generated at the same time
_TOKENS = 80
_WARM_UP = 2
_BASELINE = "an ideal cluster: one queue; every engine has seen every video, and none is lost (not reachable)"
_LOADS = (0.6, 0.8, 0.9, 1.0)  # target loads, as a share of the engines' capacity; the served load comes out similar
_ROUTINGS = (
    ("ring, full at twice", Routing.RING, 2),
    ("ring, full at once", Routing.RING, 1),
    ("ring, never full", Routing.RING, 10_000),
    ("any engine", Routing.RANDOM, 2),
)
_LOST_EVERY_S = 36.0  # with 100 engines, each is lost once an hour


async def calibrate(config: EngineConfig, on_progress: OnProgress) -> EngineTimes:
    """Start an engine and time its answers about rendered clips: new, repeated, and several at once."""
    steps = 3 + len(NUMBERS)
    on_progress("starting an engine", 0, steps)
    began = time.monotonic()
    async with new_engine(config) as engine:
        start_s = time.monotonic() - began
        clips = range(NUMBERS[-1])
        for clip in range(_WARM_UP):
            await generate_sample(engine, _request(len(clips) + clip, "warm-up"))
        on_progress("prompts", 1, steps)
        new = [await generate_sample(engine, _request(clip, "new")) for clip in clips]
        on_progress("prompts again", 2, steps)
        again = [await generate_sample(engine, _request(clip, "again")) for clip in clips]
        rates = {}
        for step, number in enumerate(NUMBERS):
            on_progress(f"{number} at once", 3 + step, steps)
            asked = [_request(clip, f"{number} at once") for clip in clips[:number]]  # prompts are cached: no prefill
            samples = await asyncio.gather(*(generate_sample(engine, each) for each in asked))
            rate = decode_rate(samples)
            assert rate is not None, f"answers of {_TOKENS} tokens"
            rates[number] = rate
    return EngineTimes(prefill_s=median_ttft_s(new), prefill_again_s=median_ttft_s(again), rates=rates, start_s=start_s)


def _request(clip: int, why: str) -> GenerationRequest:
    text = "How many objects are there?" if why == "again" else CAPTION_PROMPT
    return replace(scene_request(f"{why} {clip}", clip, _TOKENS, text, key=f"clip {clip}"), ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The size of the simulated cluster."""

    num_engines: int = number(100, "--engines-simulated", "number of engines")
    num_callers: int = number(5000, "--callers", "number of callers; each talks about one video after another")
    seconds: float = number(300.0, "--seconds", "simulated seconds that are counted", "SECONDS")

    def __post_init__(self) -> None:
        if self.num_callers <= (least := Scenario().max_running * self.num_engines):
            raise ConfigError(f"--callers must be more than the requests that the engines answer at once: {least}")


def scenario_at(load: float, times: EngineTimes, options: ClusterOptions) -> Scenario:
    """A scenario whose callers pause between questions for as long as gives about this load.

    With random arrivals, 1 / (1 - load) requests share an engine on average, limited to the engine's `max_running`.
    """
    scenario = Scenario(num_engines=options.num_engines, num_callers=options.num_callers, seconds=options.seconds)
    work_s = answer_s(times, scenario)
    waiting_s = work_s / max(1 - load, 1 / scenario.max_running)
    return replace(scenario, pause_s=options.num_callers * work_s / (load * options.num_engines) - waiting_s)


def answer_s(times: EngineTimes, scenario: Scenario) -> float:
    """Seconds of engine time per answer, at the engine's best rate; each video is prefilled in full only once."""
    prefill_s = times.prefill_again_s + (times.prefill_s - times.prefill_again_s) / scenario.questions
    return prefill_s + (1 + scenario.tokens) / max(times.rates.values())


def simulate(times: EngineTimes, options: ClusterOptions, on_progress: OnProgress) -> list[Row]:
    """Simulate every situation; each is compared with a perfect cluster at the same load."""
    at = {load: scenario_at(load, times, options) for load in _LOADS}
    plays = [
        (name, load, routing, replace(scenario, max_ongoing=full * scenario.max_running))
        for load, scenario in at.items()
        for name, routing, full in _ROUTINGS
    ]
    ours = replace(at[0.8], max_ongoing=2 * at[0.8].max_running)
    plays.append(("an engine lost every 36 s", 0.8, Routing.RING, replace(ours, engine_lost_every_s=_LOST_EVERY_S)))
    few = max(1, options.num_engines // 5)
    plays.append((f"from {few} engines by load", 0.8, Routing.RING, replace(ours, least_engines=few)))
    rows, perfect = [], dict[float, SimulationResult]()
    for done, (name, load, routing, scenario) in enumerate(until_interrupted(plays)):
        on_progress(name, done, len(plays))
        if load not in perfect:
            perfect[load] = Simulation(times, replace(scenario, max_ongoing=10**9), Routing.PERFECT).run()
        result, best = asdict(Simulation(times, scenario, routing).run()), perfect[load]
        tokens, _ = result.pop("tokens_in_time"), result.pop("answers")
        row = {
            "situation": name,
            "load": best.answers * answer_s(times, scenario) / (scenario.num_engines * scenario.seconds),
            "goodput": tokens / best.tokens_in_time if best.tokens_in_time else 0.0,
            "tokens_per_s": tokens / scenario.seconds,
        }
        rows.append(row | result)
    return rows


def measure_cluster(options: ClusterOptions, pair: EngineConfig, on_progress: OnProgress) -> Report:
    """Measure one engine and simulate many: figures, table and plot."""
    times = asyncio.run(calibrate(pair, on_progress))
    rows = simulate(times, options, on_progress)
    models = f"target {pair.target.model}, draft {pair.draft.model if pair.draft else 'none'}"
    rates = ", ".join(f"{rate:.0f} with {number}" for number, rate in times.rates.items())
    scenario = Scenario()
    return Report(
        bench="cluster",
        baseline=_BASELINE,
        facts={
            "models": models,
            "measured": f"one engine: {rates} answers at once (tokens/s); prompt {times.prefill_s * 1e3:.0f} ms, "
            f"{times.prefill_again_s * 1e3:.0f} of a known video; start {times.start_s:.1f} s",
            "simulated": f"{options.num_engines} engines, {options.num_callers} callers with {scenario.questions} "
            f"questions a video, {scenario.tokens:g} tokens an answer, {options.seconds:g} s",
        },
        figures={"times": times, "scenario": scenario, "options": options, "results": list(rows)},
        body=list(_body(rows)),
        plots={"plot": Plot(size=(9, 4), draw=lambda figure: _draw(figure, rows))},
    )


def _body(rows: Sequence[Row]) -> Iterator[RenderableType]:
    columns = {
        "situation": column("situation"),
        "load": column("load", "{:.0%}"),
        "goodput": column("goodput", "{:.3f}"),
        "tokens/s": column("tokens_per_s", "{:.0f}"),
        "moved": column("moved", "{:.1%}"),
        "first token s": column("first_token_p50_s", "{:.2f}"),
        "p99": column("first_token_p99_s", "{:.2f}"),
        "engines": column("engines", "{:.1f}"),
        "lost": column("lost_engines"),
        "handed over": column("handed_over"),
    }
    yield table("Simulated clusters", columns, rows)
    scenario = Scenario()
    yield f"goodput: tokens of answers that began within {scenario.patience_s:g} s, over the baseline's;"
    yield "load: what the baseline served, as a share of what the engines can do;"
    yield "moved: follow-ups at an engine without their video; handed over: answers that another engine continued;"
    yield "full at: requests that an engine takes at most, in multiples of those that it generates at once"


def _draw(figure: Any, rows: Sequence[Row]) -> None:
    goodput, first = figure.subplots(1, 2)
    for name in dict.fromkeys(row["situation"] for row in rows):
        of_name = [row for row in rows if row["situation"] == name]
        for axes, key in ((goodput, "goodput"), (first, "first_token_p99_s")):
            across, heights = [row["load"] for row in of_name], [row[key] for row in of_name]
            axes.plot(across, heights, "o-" if len(of_name) > 1 else "x", label=name, markersize=4)
    goodput.set(xlabel="load", ylabel="goodput over the perfect cluster", ylim=(0, 1.1))
    goodput.legend()
    first.set(xlabel="load", ylabel="first token, 99th percentile, s")
