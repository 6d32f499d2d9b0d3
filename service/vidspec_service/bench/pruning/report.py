"""The report of `bench pruning`: from judged prompts to acceptance rates with intervals; tables and plots.

Rates are paired, clip by clip, with the unpruned draft and with hippo. The bootstrap resamples whole clips, because
results about the same clip are correlated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from rich.console import RenderableType

from vidspec_models.request import Preservation
from vidspec_service.bench.common.bootstrap import Counts, Estimate, difference, estimate, paired, rate, ratio
from vidspec_service.bench.common.environment import Placement
from vidspec_service.bench.common.report import Plot, Report, Row, column, format_interval, format_value, table
from vidspec_service.bench.pruning.options import BASELINE, FIXED, PruningConfig, PruningOptions
from vidspec_service.bench.pruning.teacher_forcing import ForcedAnswer, count_accepted

ALL_TASKS = "all"
WINDOW = 8  # proposals per verification, for `mean_accepted_tokens`
_LEVELS = {"none": "all video tokens", "blind": "no video tokens"}
_OURS: Any = {"linewidth": 2.8, "markersize": 5, "zorder": 3}
_OTHERS: Any = {"linewidth": 1.2, "markersize": 3}
_SPANS = {"tower": "#9bb7c9", "prefill": "#1f5f8b", "prefill again": "#e08e45"}

# Of a configuration, a task and an acceptance rate: tokens/s, and where that is from.
Speed = Callable[[PruningConfig, str, float], tuple[float | None, str]]


def results(options: PruningOptions, answers: Sequence[ForcedAnswer], speed: Speed) -> list[Row]:
    """Every strategy at every ratio, on each task and on all together; at ratio 0, each equals `none`."""
    rows = [
        _result(strategy, share, task, [each for each in answers if task in (ALL_TASKS, each.task)], speed)
        for strategy in options.strategies
        for share in options.ratios_of(strategy)
        for task in (ALL_TASKS, *options.tasks)
    ]
    return [row for row in rows if row]


def _result(strategy: Preservation, share: float, task: str, of_task: Sequence[ForcedAnswer], speed: Speed) -> Row:
    """One row of results, with 95 % bootstrap intervals over clips; empty if nothing was judged."""
    config = _measured_as(strategy, share)
    mine = [each for each in of_task if each.config == config]
    if not mine:
        return {}
    counts, hippo = _counts(of_task, config), _counts(of_task, _measured_as(Preservation.HIPPO, share))
    acceptance = estimate(rate, list(counts.values()))
    accepted, verifications = map(sum, zip(*(count_accepted(each.matches, WINDOW) for each in mine), strict=True))
    assert acceptance.value is not None, "an answer without a token"
    low, high = acceptance.interval or (None, None)
    tokens_per_s, source = speed(config, task, acceptance.value)
    return {
        "strategy": strategy.value,
        "ratio": share,
        "task": str(task),
        "acceptance_rate": acceptance.value,
        "ci_low": low,
        "ci_high": high,
        # per verification of WINDOW proposals, serial schedule
        "mean_accepted_tokens": accepted / verifications,
        "draft_prefill_s": median(each.prefill_s for each in mine),
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_from": source,  # "engine" or "speed model"
        "over_unpruned": paired(ratio, counts, _counts(of_task, PruningConfig(BASELINE, 0.0))),
        # hippo's acceptance at this ratio less this one's: above 0, hippo is better
        "less_than_hippo": paired(difference, hippo, counts) if hippo else None,
        "selection_s": median(each.selection_s for each in mine),
        "video_tokens": fmean(each.video_tokens for each in mine),  # that the draft sees
        "num_tokens": sum(len(each.matches) for each in mine),  # judged
    }


def _measured_as(strategy: Preservation, share: float) -> PruningConfig:
    return PruningConfig(strategy, share) if share > 0 else PruningConfig(BASELINE, 0.0)


def _counts(answers: Sequence[ForcedAnswer], config: PruningConfig) -> Counts:
    """Accepted and judged tokens of each clip."""
    sums: dict[int, tuple[int, int]] = {}
    for each in answers:
        if each.config == config:
            accepted, number = sums.get(each.clip, (0, 0))
            sums[each.clip] = (accepted + sum(each.matches), number + len(each.matches))
    return sums


def pruning_report(
    options: PruningOptions, rows: Sequence[Row], clip: Row, models: Mapping[str, Row], placements: Sequence[Placement]
) -> Report:
    """`clip`: results of the long clip; `models`: facts by role."""
    named = {role: "{model}, {device} {dtype}, {threads} threads".format(**facts) for role, facts in models.items()}
    of_clips = f"{options.num_clips}, at most {options.max_tokens} tokens, greedy, including first tokens"
    return Report(
        bench="pruning",
        baseline="none: the draft sees every video token (ratio 0)",
        placements=placements,
        facts={**named, "clips": of_clips},
        figures={
            "models": models,
            "clips": options.num_clips,
            "window": WINDOW,
            "max_tokens": options.max_tokens,
            "results": rows,
            "long_clip": clip,
        },
        body=list(_body(rows, clip)),
        plots={"plot": Plot(size=(11, 5), draw=lambda figure: draw_report(figure, _all_tasks(rows), clip))},
    )


def _all_tasks(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["task"] == ALL_TASKS]


def _body(rows: Sequence[Row], clip: Row) -> Iterator[RenderableType]:
    columns = {
        "strategy": column("strategy"),
        "ratio": column("ratio", "{:g}"),
        "tokens seen": column("video_tokens", "{:.0f}"),
        "acceptance": column("acceptance_rate", "{:.3f}"),
        "95 %": lambda row: format_interval(
            None if row["ci_low"] is None else (row["ci_low"], row["ci_high"]), "{:.3f}"
        ),
        "vs unpruned": lambda row: _interval(row["over_unpruned"], "{:.3f}"),
        "hippo minus this": lambda row: (
            "" if row["strategy"] == Preservation.HIPPO else _interval(row["less_than_hippo"], "{:+.3f}")
        ),
        "accepted": column("mean_accepted_tokens", "{:.2f}"),
        "prefill ms": column("draft_prefill_s", "{:.1f}", 1000),
        "tok/s": column("tokens_per_s", "{:.0f}"),
    }
    yield table("Acceptance on all tasks, with 95 % intervals over clips", columns, _all_tasks(rows))
    if of_engine := [row for row in rows if row["tokens_per_s_from"] == "engine"]:
        names = ("strategy", "ratio", "acceptance", "tok/s")
        yield table("Captions in the engine", {name: columns[name] for name in names}, of_engine)
    for share in sorted({row["ratio"] for row in rows if row["strategy"] not in FIXED and row["ratio"] >= 0.9}):
        yield _by_task(rows, share)
    yield from _times(clip)


def _interval(found: Estimate | None, form: str) -> str:
    return "" if found is None else format_value(found.value, form, interval=found.interval)


def _by_task(rows: Sequence[Row], share: float) -> RenderableType:
    """Strategies down, tasks across; a star where hippo is better beyond the interval, a minus where it is worse."""
    tasks = [task for task in dict.fromkeys(row["task"] for row in rows) if task != ALL_TASKS]
    shown = [row for row in rows if row["ratio"] == FIXED.get(row["strategy"], share)]
    lines = {row["strategy"]: dict.fromkeys(tasks, "") | {"strategy": row["strategy"]} for row in shown}
    for row in shown:
        lines[row["strategy"]][row["task"]] = _marked(row)
    columns = {name: column(name) for name in ("strategy", *tasks)}
    title = f"Acceptance by task at {share:g} (* hippo is better, - hippo is worse, beyond the 95 % interval)"
    return table(title, columns, lines.values())


def _marked(row: Row) -> str:
    less: Estimate | None = row["less_than_hippo"]
    low, high = (less.interval if less else None) or (0.0, 0.0)
    mark = "*" if low > 0 else "-" if high < 0 else ""
    return f"{row['acceptance_rate']:.3f}{mark}"


def _times(clip: Row) -> Iterator[str]:
    line = {name: f"{1000 * seconds:.1f}" for name, seconds in clip["time_line"].items()}
    yield f"one clip of {clip['frames']} frames, {clip['video_tokens']} video tokens:"
    yield (
        f"  target prefill {1000 * clip['target_prefill_s']:.1f} ms; relevance {1000 * clip['relevance_s']:.2f} ms, "
        f"relevance and hippo's choice {100 * clip['scoring_over_prefill']:.2f} % of the prefill"
    )
    prefills = ", ".join(f"{share}: {1000 * seconds:.1f}" for share, seconds in clip["draft_prefill_s"].items())
    yield f"  draft prefill in ms by ratio: {prefills}; pruned over unpruned {clip['draft_prefill_ratio']:.3f}"
    yield (
        f"  time line in ms: first token {line['target_first_token_s']}; draft ready {line['draft_ready_s']}, "
        f"refined {line['draft_refined_s']}; draft ready if it had waited {line['draft_ready_if_it_waited_s']}"
    )


def draw_report(figure: Any, rows: Sequence[Row], clip: Row) -> None:
    """Draw a line per strategy from `rows` (all tasks together), and the time line of the long `clip`."""
    acceptance, lanes = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_acceptance(acceptance, rows)
    _draw_time_line(lanes, clip)


def _draw_acceptance(axes: Any, rows: Sequence[Row]) -> None:
    """Draw the ratios at equal distances, because the important changes happen between 0.9 and 0.95."""
    shown = sorted({row["ratio"] for row in rows if row["strategy"] not in _LEVELS})
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        rates = [row["acceptance_rate"] for row in mine]
        if strategy in _LEVELS:
            axes.axhline(rates[0], color="grey", linestyle="--", linewidth=1)
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
            axes.annotate(_LEVELS[strategy], (1, rates[0]), (-4, 3), color="dimgrey", **place)
            continue
        places = [shown.index(row["ratio"]) for row in mine]
        axes.plot(places, rates, marker="o", label=strategy, **(_OURS if strategy == Preservation.HIPPO else _OTHERS))
        if strategy == Preservation.HIPPO and mine[0]["ci_low"] is not None:
            axes.fill_between(places, [row["ci_low"] for row in mine], [row["ci_high"] for row in mine], alpha=0.15)
    axes.set_xticks(range(len(shown)), [f"{100 * ratio:g} %" for ratio in shown])
    axes.set_xlabel("of the video's tokens left out of the draft's prompt")
    axes.set_ylabel("share of the target's tokens that the draft guesses")
    axes.set_title("Acceptance of the pruned draft, all tasks (band: 95 %, over clips)")
    axes.grid(axis="y", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 0.06))


def _draw_time_line(axes: Any, clip: Row) -> None:
    line = clip["time_line"]
    scores, ready, first_token = line["relevance_s"], line["draft_ready_s"], line["target_first_token_s"]
    target_s, draft_s = clip["target_prepare_s"], clip["draft_prepare_s"]
    spans = [
        ("target", "tower", 0.0, target_s),
        ("target", "prefill", target_s, first_token),
        ("draft", "tower", 0.0, draft_s),
        ("draft", "prefill", draft_s, ready),
        ("draft", "prefill again", max(scores, ready), line["draft_refined_s"]),
        ("draft, had\nit waited", "tower", 0.0, draft_s),
        ("draft, had\nit waited", "prefill", max(scores, draft_s), line["draft_ready_if_it_waited_s"]),
    ]
    for lane, what, start, end in spans:
        axes.barh(lane, 1000 * (end - start), 0.6, 1000 * start, color=_SPANS[what], label=what)
    axes.axvline(1000 * first_token, color="black", linewidth=0.8)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles=dict(zip(names, handles, strict=True)).values(), loc="center")
    axes.invert_yaxis()
    axes.set_xlabel("ms after both took the request up; line: first token")
    axes.set_title(f"When the draft can propose, {clip['frames']} frames")
