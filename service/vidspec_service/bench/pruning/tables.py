"""The report as rich tables and lines."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from vidspec_service.bench.pruning.report import ALL_TASKS, PruningReport, PruningResult

_QUIET_LOAD = 0.3  # per core


def renderables(report: PruningReport) -> Iterator[RenderableType]:
    """Facts first, then acceptance, then time."""
    yield from _heading(report)
    yield _overall(report)
    yield from (_by_task(report, ratio) for ratio in _ratios(report) if ratio >= 0.9)
    yield from _time(report)
    yield from _following(report)


def _heading(report: PruningReport) -> Iterator[str]:
    machine = report.hardware
    yield f"hardware  {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB; {' '.join(machine.flags)}"
    yield "versions  " + ", ".join(f"{name} {value}" for name, value in report.versions.items())
    for role, facts in report.models.items():
        yield f"{role:<10}{facts.model}, {facts.device} {facts.dtype}, {facts.threads} threads"
    yield f"clips     {report.clips}, at most {report.max_tokens} tokens, greedy; first tokens count, too"
    yield f"baseline  {report.baseline}"
    yield f"command   {report.command}"
    if report.load_average_before > _QUIET_LOAD * machine.cores:
        yield f"WARNING: load average {report.load_average_before:.2f} before the run: do not trust its timings"


def _overall(report: PruningReport) -> Table:
    table = Table(title="Acceptance on all tasks, 95 % over clips", title_justify="left")
    columns = ("ratio", "tokens seen", "acceptance", "95 %", "of unpruned", "hippo less this", "accepted", "prefill ms")
    table.add_column("strategy", no_wrap=True)
    for name in (*columns, "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in report.results:
        if result.task == ALL_TASKS:
            table.add_row(*_overall_cells(result))
    return table


def _overall_cells(result: PruningResult) -> tuple[str, ...]:
    over, less = result.over_unpruned, result.less_than_hippo
    is_itself = less is None or result.strategy == "hippo"
    return (
        result.strategy,
        f"{result.ratio:g}",
        f"{result.video_tokens:.0f}",
        f"{result.acceptance_rate:.3f}",
        f"{result.ci_low:.3f}..{result.ci_high:.3f}",
        f"{over.value:.3f} ({over.low:.3f}..{over.high:.3f})",
        "" if is_itself or less is None else f"{less.value:+.3f} ({less.low:+.3f}..{less.high:+.3f})",
        f"{result.mean_accepted_tokens:.2f}",
        f"{1000 * result.draft_prefill_s:.1f}",
        f"{result.tokens_per_s:.0f}",
    )


def _by_task(report: PruningReport, ratio: float) -> Table:
    """Strategies down, tasks across; a star where hippo is better beyond the interval, a minus where it is worse."""
    tasks = [task for task in dict.fromkeys(result.task for result in report.results) if task != ALL_TASKS]
    title = f"Acceptance by task at {ratio:g} (* hippo is better, - hippo is worse, beyond the 95 % interval)"
    table = Table(title=title, title_justify="left")
    table.add_column("strategy")
    for task in tasks:
        table.add_column(task, justify="right", no_wrap=True)
    for strategy in dict.fromkeys(result.strategy for result in report.results):
        shown = [report.of(strategy, share, task) for task in tasks for share in (_share(report, strategy, ratio),)]
        table.add_row(strategy, *("" if result is None else _marked(result) for result in shown))
    return table


def _share(report: PruningReport, strategy: str, ratio: float) -> float:
    """`none` and `blind` have one ratio of their own."""
    own = {result.ratio for result in report.results if result.strategy == strategy}
    return ratio if ratio in own else min(own)


def _marked(result: PruningResult) -> str:
    less = result.less_than_hippo
    mark = "" if less is None else "*" if less.low > 0 else "-" if less.high < 0 else ""
    return f"{result.acceptance_rate:.3f}{mark}"


def _ratios(report: PruningReport) -> list[float]:
    return sorted({result.ratio for result in report.results if result.strategy not in ("none", "blind")})


def _time(report: PruningReport) -> Iterator[str]:
    clip, line = report.long_clip, report.long_clip.time_line
    yield f"one clip of {clip.frames} frames, {clip.video_tokens} video tokens:"
    yield (
        f"  target prefill {1000 * clip.target_prefill_s:.1f} ms; relevance {1000 * clip.relevance_s:.2f} ms, "
        f"with hippo's choice {100 * clip.scoring_over_prefill:.2f} % of it"
    )
    prefills = ", ".join(f"{ratio}: {1000 * seconds:.1f}" for ratio, seconds in clip.draft_prefill_s.items())
    yield f"  draft prefill in ms by ratio: {prefills}; pruned over unpruned {clip.draft_prefill_ratio:.3f}"
    yield (
        f"  time line in ms: first token {1000 * line.target_first_token_s:.1f}; draft ready "
        f"{1000 * line.draft_ready_s:.1f}, refined {1000 * line.draft_refined_s:.1f}; "
        f"had it waited {1000 * line.draft_ready_if_it_waited_s:.1f}"
    )


def _following(report: PruningReport) -> Iterator[str]:
    if report.following:
        yield f"hippo at 0.9, chosen anew every {report.following_every} tokens, by third of the captions:"
    for third in report.following:
        gain = third.gain
        yield (
            f"  {third.third:<8} once {third.once.value:.3f}, anew {third.anew.value:.3f}, "
            f"gain {gain.value:+.4f} ({gain.low:+.4f}..{gain.high:+.4f})"
        )
