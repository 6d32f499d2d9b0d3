"""The report of `bench speed`: a row for each mode with explaining figures, a bar plot and one request's timeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from vidspec_service.bench.common.bootstrap import whiskers
from vidspec_service.bench.common.report import Plot, Report, Row, column, format_interval, format_value, table
from vidspec_service.bench.common.samples import Interval, acceptance, decode_rate, median_ttft_s, speedup, total_rate
from vidspec_service.bench.speed.activity import ForwardSpan, forward_facts, idle_ratio, steps_within, within
from vidspec_service.bench.speed.costs import ForwardTimes, ProbedCosts, costs_alone, costs_in_run, predict
from vidspec_service.bench.speed.identity import (
    find_forks,
    fork_lines,
    is_identical,
    is_identical_to_hf,
    reference_mode,
)
from vidspec_service.bench.speed.options import BASELINE, Mode, SpeedOptions
from vidspec_service.bench.speed.run import Measurements
from vidspec_service.bench.speed.synthetic import roofline_table, synthetic_facts
from vidspec_service.engine.cgroups import num_cores
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.speculation.plan import Plan

_COLOURS = {"target": "#1f5f8b", "draft": "#e08e45"}
_ZOOM_FORWARDS = 10
_LANE = 0.8


def draw_speedups(figure: Any, modes: Mapping[str, Row]) -> None:
    """One bar per mode: the speed-up over the baseline with its interval, labelled with tokens per second."""
    axes = figure.add_subplot()
    for index, row in enumerate(modes.values()):
        height = row["speedup_vs_off"] or 0.0
        below, above = whiskers(height, row["speedup_interval"])
        axes.bar(index, height, yerr=[[below], [above]], capsize=4, color=_COLOURS["target"], width=0.6)
        label = f"{format_value(row['speedup_vs_off'], '{:.2f}x')}\n{format_value(row['tokens_per_s'], '{:.0f}')} tok/s"
        axes.annotate(label, (index, height + above), (0, 4), textcoords="offset points", ha="center", va="bottom")
        if row["predicted_speedup"] is not None:
            axes.plot([index - 0.3, index + 0.3], [row["predicted_speedup"]] * 2, "k--", linewidth=1)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(modes)), list(modes))
    axes.set_ylabel("decoding speed relative to off")
    axes.margins(y=0.2)
    axes.set_title("Speed by mode (dashed: predicted by the speed model; bars: 95 % interval over prompts)")


def draw_timeline(figure: Any, lanes: Mapping[str, Sequence[ForwardSpan]], window: Interval) -> None:
    """Both workers' forwards from a request's first to last token (above), and the middle of them enlarged (below)."""
    whole, zoom = figure.subplots(2, 1)
    forwards = within(lanes["target"], window)
    middle = forwards[max((len(forwards) - _ZOOM_FORWARDS) // 2, 0) :][:_ZOOM_FORWARDS]
    zoomed = (middle[0][0], middle[-1][1]) if len(forwards) > _ZOOM_FORWARDS else window
    for axes, (start, stop), title in (
        (whole, window, "One request in mode parallel, first to last token"),
        (zoom, zoomed, "Enlarged; numbers are rows of a forward"),
    ):
        for height, role in enumerate(("draft", "target")):
            work = within(lanes[role], (start, stop))
            bars = [(1000 * (begin - window[0]), 1000 * (end - begin)) for begin, end, _ in work]
            place = (height - _LANE / 2, _LANE)
            axes.broken_barh(bars, place, color=_COLOURS[role], edgecolor="white", linewidth=0.3)
        axes.set_yticks((0, 1), ("draft", "target"))
        axes.set_xlim(1000 * (start - window[0]), 1000 * (stop - window[0]))
        axes.set_title(title)
        axes.set_xlabel("ms after the first token")
    for begin, end, num_rows in within(lanes["target"], zoomed):
        at_ms = 1000 * ((begin + end) / 2 - window[0])
        zoom.annotate(str(num_rows), (at_ms, 1), ha="center", va="center", color="white", clip_on=True)


def mode_row(mode: Mode, measured: Measurements, concurrency: int) -> Row:
    """Results of one mode. Decoding rates leave out each answer's first tokens; throughput counts all tokens.

    Predictions are made only for one request at a time: from the forwards timed alone, and from the run's own steps.
    """
    samples, base = measured.of(mode), measured.of(BASELINE)
    over_off = speedup(samples, base)
    total, base_total = total_rate(samples), total_rate(base)
    activity = measured.activities.get(mode)
    windows = [sample.decode_interval for sample in samples]
    spans = {role: activity.spans(role) for role in activity.roles} if activity is not None else {}
    steps = {role: steps_within(of, windows) for role, of in spans.items()}
    by_forwards = by_steps = None
    acceptance_rate, num_accepted = acceptance(samples) if mode.needs_draft else (None, None)
    if acceptance_rate is not None and concurrency == 1:
        latency_s = measured.round_trip["p50_s"]
        by_forwards = predict(mode, acceptance_rate, costs_alone(mode, measured.costs, latency_s))
        if base_rate := decode_rate(base):
            in_run = costs_in_run(steps["target"], steps.get("draft", []), latency_s, 1 / base_rate)
            by_steps = predict(mode, acceptance_rate, in_run)
    return {
        "tokens_per_s": decode_rate(samples),
        "speedup_vs_off": over_off.value,
        "speedup_interval": over_off.interval,
        "throughput_tokens_per_s": total,
        "throughput_vs_off": total / base_total if base_total else None,
        "ttft_s": median_ttft_s(samples),
        "num_tokens": sum(len(sample.ids) for sample in samples),
        "acceptance_rate": acceptance_rate,
        "mean_accepted_tokens": num_accepted,
        **_prediction("predicted", by_forwards, over_off.value),
        **_prediction("predicted_by_steps", by_steps, over_off.value),
        "workers": {  # while answers of this mode were decoded
            role: {"idle_ratio": idle_ratio(of, windows), "forwards": forward_facts(steps[role])}
            for role, of in spans.items()
        },
    }


def _prediction(name: str, plan: Plan | None, measured: float | None) -> Row:
    """A plan's speed-up, what it verifies at once, and the share of the speed-up that was reached."""
    return {
        f"{name}_speedup": plan.speedup if plan else None,
        f"{name}_min_draft_tokens": plan.min_draft_tokens if plan else None,
        f"{name}_max_draft_tokens": plan.max_draft_tokens if plan else None,
        f"{name}_reached": measured / plan.speedup if plan and measured is not None else None,
    }


def speed_report(options: SpeedOptions, pair: EngineConfig, measured: Measurements) -> Report:
    """Build the report. `identical` compares the token ids, not the text, of the engine's modes."""
    costs = measured.costs
    synthetic = synthetic_facts(options, costs) if options.is_synthetic else None
    options = replace(options, num_prompts=len({sample.prompt for sample in measured.samples}))
    forks = find_forks(measured.samples, reference_mode(options.modes))
    identical = is_identical(options, forks)
    models = _models(pair, costs)
    figures: Row = {
        "models": models,
        "prompts": options.num_prompts,
        "task": options.task_name,
        "max_tokens": options.max_tokens,
        "sampling": options.sampling(),
        "concurrency": options.concurrency,
        "modes": {mode: mode_row(mode, measured, options.concurrency) for mode in options.modes},
        "cost_ratio": costs.cost_ratio,  # c = T_target(1) / T_draft(1)
        "costs": costs,
        "channel_round_trip": measured.round_trip,
        "identical": identical,
        "identical_to_hf": is_identical_to_hf(options, forks),
        "forks": forks,
        "samples": [sample.facts() for sample in measured.samples],
        "synthetic": synthetic,  # of random models only
    }
    at_once = f", {options.concurrency} at once" if options.concurrency > 1 else ""
    asked = f"{options.num_prompts} x {options.task_name}, at most {options.max_tokens} tokens"
    facts = {role: "{model}, {device} {dtype}, {threads} threads".format(**of) for role, of in models.items()}
    facts["prompts"] = f"{asked}, {options.sampling_text}{at_once}"
    if synthetic is not None:
        form = "{shape}: {video_tokens} video tokens, acceptance {acceptance:g} imposed"
        facts["synthetic"] = form.format(**synthetic)
    plots = {"plot": Plot(size=(8, 4.8), draw=lambda figure: draw_speedups(figure, figures["modes"]))}
    if Mode.PARALLEL in options.modes:
        lanes, window = measured.lanes(Mode.PARALLEL)
        plots["timeline"] = Plot(size=(11, 5.2), draw=lambda figure: draw_timeline(figure, lanes, window))
    return Report(
        bench="speed",
        baseline=f"{BASELINE}: the target alone in the same engine, without a draft, {costs.alone.threads} threads",
        placements=[each for each in (costs.target, costs.alone, costs.draft) if each],
        facts=facts,
        figures=figures,
        body=list(_body(figures, measured)),
        plots=plots,
        failure="the modes did not give the same token ids" if identical is False else None,
    )


def _models(pair: EngineConfig, costs: ProbedCosts) -> dict[str, Row]:
    """Facts of each model that ran; whether rows are invariant is unknown for stock transformers."""

    def facts(model: str, forwards: ForwardTimes) -> Row:
        return {**forwards.facts(model, forwards.threads), "rows_are_invariant": forwards.rows_are_invariant}

    alone = facts(pair.target.model, costs.alone)
    models = {
        "target": facts(pair.target.model, costs.target),
        "off": alone,
        "hf": {**alone, "threads": num_cores(), "rows_are_invariant": None},
    }
    if pair.draft is not None and costs.draft is not None:
        models["draft"] = facts(pair.draft.model, costs.draft)
    return models


def _body(figures: Row, measured: Measurements) -> Iterator[RenderableType]:
    modes: Mapping[str, Row] = figures["modes"]
    yield _modes_table(modes)
    yield _costs_table(measured.costs)
    if (synthetic := figures["synthetic"]) is not None:
        yield roofline_table(synthetic["rooflines"])
        yield from (f"note      {note}" for note in synthetic["notes"])
    for mode, row in modes.items():
        steps = [
            f"{role} {1000 * use['forwards']['median_s']:.3f} ms ({use['forwards']['mean_rows']:.1f} rows)"
            for role, use in row["workers"].items()
            if use["forwards"] is not None
        ]
        if steps:
            yield f"steps in the run, {mode}: {', '.join(steps)}"
    yield f"c = T_target(1) / T_draft = {format_value(figures['cost_ratio'], '{:.2f}')}"
    p50_s, p99_s, count = measured.round_trip.values()
    yield f"channel round trip: p50 {1000 * p50_s:.3f} ms, p99 {1000 * p99_s:.3f} ms ({count})"
    yield f"identical ids: {_verdict(figures['identical'])}; equal to hf: {_verdict(figures['identical_to_hf'])}"
    yield from fork_lines(figures["forks"], is_hf_compared=figures["identical_to_hf"] is not None)


def _modes_table(modes: Mapping[str, Row]) -> RenderableType:
    def idle(row: Row) -> str:
        return " / ".join(format_value(use["idle_ratio"], "{:.0%}") for use in row["workers"].values()) or "-"

    columns = {
        "mode": column("mode"),
        "tokens/s": column("tokens_per_s", "{:.1f}"),
        "vs off": column("speedup_vs_off", "{:.2f}x"),
        "95 %": lambda row: format_interval(row["speedup_interval"], "{:.2f}"),
        "all-in tok/s": column("throughput_tokens_per_s", "{:.1f}"),
        "TTFT ms": column("ttft_s", "{:.0f}", 1000),
        "alpha": column("acceptance_rate", "{:.3f}"),
        "accepted": column("mean_accepted_tokens", "{:.2f}"),
        "predicted": column("predicted_speedup", "{:.2f}x"),
        "of it": column("predicted_reached", "{:.0%}"),
        "by steps": column("predicted_by_steps_speedup", "{:.2f}x"),
        "of that": column("predicted_by_steps_reached", "{:.0%}"),
        "idle t/d": idle,
    }
    return table("Speed by mode", columns, [{"mode": mode, **row} for mode, row in modes.items()])


def _costs_table(costs: ProbedCosts) -> RenderableType:
    named = {"target with all cores": costs.alone}
    if costs.draft is not None:
        named = {"target beside a busy draft": costs.target, **named, "draft": costs.draft}
    counts = sorted(costs.alone.seconds)
    rows = [
        {"model": f"{name} ({of.threads} threads)", **{str(n): of.seconds.get(n) for n in counts}}
        for name, of in named.items()
    ]
    columns = {"model": column("model"), **{f"T({n})": column(str(n), "{:.3f}", 1000) for n in counts}}
    return table(f"One forward, median ms, {costs.context} rows in the cache", columns, rows)


def _verdict(value: bool | None) -> str:
    return {True: "yes, 100 %", False: "NO", None: "not compared"}[value]
