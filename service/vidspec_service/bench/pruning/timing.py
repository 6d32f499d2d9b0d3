"""What choosing costs and saves in time, on one long clip; and when the draft can begin, with and without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from vidspec_models.preservation import find_strategy, kept_of_prompt, pruned
from vidspec_service.bench.pruning.asking import long_clip
from vidspec_service.bench.pruning.judging import LoadedPair
from vidspec_service.bench.pruning.options import PruningOptions
from vidspec_service.bench.pruning.teacher_forcing import prefilled
from vidspec_service.engine.conversion import model_inputs
from vidspec_service.engine.types import Preservation

_REPEATS = 5
_SHOWN = Preservation.HIPPO


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLine:
    """Seconds after both workers took the request up."""

    target_first_token_s: float
    relevance_s: float  # the draft has the target's scores
    draft_ready_s: float  # it can propose, from its own scores
    draft_refined_s: float  # it sees what the target's scores chose
    draft_ready_if_it_waited_s: float  # had it waited for those scores before its prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class LongClip:
    """Medians of a few runs on one clip. Keys of `selection_s` are strategies, of `draft_prefill_s` ratios."""

    frames: int
    video_tokens: int
    target_prepare_s: float
    target_prefill_s: float
    draft_prepare_s: float
    relevance_s: float
    relevance_over_prefill: float
    scoring_over_prefill: float  # relevance on the target and hippo's choice on the draft
    selection_s: Mapping[str, float]
    draft_prefill_s: Mapping[str, float]
    draft_prefill_ratio: float  # at the largest ratio up to 0.9, over unpruned
    time_line: TimeLine


def measure_long_clip(models: LoadedPair, options: PruningOptions) -> LongClip:
    """Times every part on its own, so that none waits for another."""
    asked = long_clip(options.long_frames)
    inputs = model_inputs(asked.messages, (asked.video,))
    target, law = models.run_as("target"), find_strategy(_SHOWN).relevance
    assert law is not None
    target_prepare_s = _median_s(lambda: target.prepare(*inputs), 2)
    prompt = target.prepare(*inputs)
    runs = [prefilled(target, prompt, models.chunk, 0, [law]) for _ in range(_REPEATS)]
    target_prefill_s = median(run.seconds for run in runs)
    relevance_s = _median_s(lambda: runs[-1].queries[law].relevance(runs[-1].cache))
    relevance = runs[-1].queries[law].relevance(runs[-1].cache)

    draft = models.run_as("draft")
    draft_prepare_s = _median_s(lambda: draft.prepare(*inputs), 2)
    whole = draft.prepare(*inputs)
    selection_s = {
        strategy.value: _median_s(partial(kept_of_prompt, find_strategy(strategy), 0.9, whole, relevance))
        for strategy in options.strategies
    }
    ratios = sorted({0.0, *options.ratios})
    prefills = {}
    for ratio in ratios:
        seen = pruned(whole, kept_of_prompt(find_strategy(_SHOWN), ratio, whole))
        prefills[ratio] = median(prefilled(draft, seen, models.chunk, 0).seconds for _ in range(_REPEATS))
    shown = max(ratio for ratio in ratios if ratio <= 0.9)
    choice_s = selection_s.get(_SHOWN.value, 0.0)
    return LongClip(
        frames=options.long_frames,
        video_tokens=prompt.num_video_tokens,
        target_prepare_s=target_prepare_s,
        target_prefill_s=target_prefill_s,
        draft_prepare_s=draft_prepare_s,
        relevance_s=relevance_s,
        relevance_over_prefill=relevance_s / target_prefill_s,
        scoring_over_prefill=(relevance_s + choice_s) / target_prefill_s,
        selection_s=selection_s,
        draft_prefill_s={f"{ratio:g}": seconds for ratio, seconds in prefills.items()},
        draft_prefill_ratio=prefills[shown] / prefills[0.0],
        time_line=time_line(
            first_token_s=target_prepare_s + target_prefill_s,
            relevance_s=relevance_s,
            draft_prepare_s=draft_prepare_s,
            choice_s=choice_s,
            draft_prefill_s=prefills[shown],
        ),
    )


def time_line(
    *, first_token_s: float, relevance_s: float, draft_prepare_s: float, choice_s: float, draft_prefill_s: float
) -> TimeLine:
    """Both workers begin at once; the target measures relevance after its first token."""
    scores_s = first_token_s + relevance_s
    ready_s = draft_prepare_s + choice_s + draft_prefill_s
    return TimeLine(
        target_first_token_s=first_token_s,
        relevance_s=scores_s,
        draft_ready_s=ready_s,
        draft_refined_s=max(ready_s, scores_s) + choice_s + draft_prefill_s,
        draft_ready_if_it_waited_s=max(draft_prepare_s, scores_s) + choice_s + draft_prefill_s,
    )


def _median_s(work: Callable[[], object], repeats: int = _REPEATS) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds)
