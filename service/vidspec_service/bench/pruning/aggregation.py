"""From judged prompts to results: rates with intervals, paired with the unpruned draft and with hippo. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median

from vidspec_service.bench.pruning.judging import Judged, Setting
from vidspec_service.bench.pruning.options import BASELINE, PruningOptions
from vidspec_service.bench.pruning.report import ALL_TASKS, PruningResult
from vidspec_service.bench.pruning.statistics import added, difference, rate, ratio
from vidspec_service.bench.pruning.teacher_forcing import mean_accepted
from vidspec_service.engine.types import Preservation

WINDOW = 8  # proposals per verification, for `mean_accepted_tokens`

Speed = Callable[[Setting, str, float], tuple[float, str]]  # setting, task, acceptance to (tokens/s, where from)


def results(options: PruningOptions, judged: Sequence[Judged], speed: Speed) -> tuple[PruningResult, ...]:
    """Every strategy at every ratio, on each task and on all together."""
    return tuple(_results(options, judged, speed))


def _results(options: PruningOptions, judged: Sequence[Judged], speed: Speed) -> Iterator[PruningResult]:
    tasks = [ALL_TASKS, *(task.value for task in options.tasks)]
    for strategy in options.strategies:
        for share in _ratios(options, strategy):
            for task in tasks:
                mine = _of(judged, _measured_as(strategy, share), task)
                if mine:
                    yield _result(strategy, share, task, mine, judged, speed)


def _ratios(options: PruningOptions, strategy: Preservation) -> tuple[float, ...]:
    fixed = {Preservation.NONE: (0.0,), Preservation.BLIND: (1.0,)}
    return fixed.get(strategy, options.ratios)


def _measured_as(strategy: Preservation, share: float) -> Setting:
    return Setting(strategy, share) if share > 0 else Setting(BASELINE, 0.0)


def _of(judged: Sequence[Judged], setting: Setting, task: str) -> list[Judged]:
    return [each for each in judged if each.setting == setting and task in (ALL_TASKS, each.task)]


def _counts(judged: Sequence[Judged]) -> dict[int, tuple[int, int]]:
    return added([(each.clip, sum(each.hits), len(each.hits)) for each in judged])


def _result(
    strategy: Preservation, share: float, task: str, mine: list[Judged], judged: Sequence[Judged], speed: Speed
) -> PruningResult:
    counts, setting = _counts(mine), _measured_as(strategy, share)
    hippo = _of(judged, _measured_as(Preservation.HIPPO, share), task)
    acceptance = rate(counts)
    runs = [mean_accepted(each.hits, WINDOW) for each in mine]
    tokens_per_s, source = speed(setting, task, acceptance.value)
    return PruningResult(
        strategy=strategy.value,
        ratio=share,
        task=task,
        acceptance_rate=acceptance.value,
        ci_low=acceptance.low,
        ci_high=acceptance.high,
        mean_accepted_tokens=sum(accepted for accepted, _ in runs) / sum(number for _, number in runs),
        draft_prefill_s=median(each.prefill_s for each in mine),
        tokens_per_s=tokens_per_s,
        tokens_per_s_from=source,
        over_unpruned=ratio(counts, _counts(_of(judged, Setting(BASELINE, 0.0), task))),
        less_than_hippo=difference(_counts(hippo), counts) if hippo else None,
        selection_s=median(each.selection_s for each in mine),
        video_tokens=fmean(each.video_tokens for each in mine),
        num_tokens=sum(len(each.hits) for each in mine),
    )
