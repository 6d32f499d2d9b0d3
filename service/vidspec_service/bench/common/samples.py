"""Sample: one timed answer of an engine or a peer; and the figures made from the samples of a mode. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from statistics import median

from vidspec_service.bench.common.bootstrap import Counts, Estimate, paired, ratio
from vidspec_service.engine.types import SpeculationStats
from vidspec_service.errors import GenerationFailed

Interval = tuple[float, float]  # start and stop, in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer. Times are on the monotonic clock of the process that received the tokens."""

    ids: tuple[int, ...]
    prompt_tokens: int
    submitted: float
    times: tuple[float, ...]  # one for each group of tokens that were committed together
    num_first: int = 1  # tokens that had arrived at the first of `times`
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    mode: str = ""
    group: int = 0  # prompts of one group were answered together; modes are compared group by group
    prompt: int = 0

    def __post_init__(self) -> None:
        if not self.times:
            raise GenerationFailed("no token came")

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]

    @property
    def ttft_s(self) -> float:
        """From submission to the first token."""
        return self.first - self.submitted

    @property
    def decode_interval(self) -> Interval:
        """From first to last token."""
        return self.first, self.last

    def facts(self) -> dict[str, object]:
        """Everything but the ids, so that every figure can be recomputed from the JSON file."""
        return {
            "mode": self.mode,
            "group": self.group,
            "prompt": self.prompt,
            "num_tokens": len(self.ids),
            "num_first": self.num_first,
            "prompt_tokens": self.prompt_tokens,
            "ttft_s": self.ttft_s,
            "decode_s": self.last - self.first,
            "speculation": self.speculation,
        }


def decode_by_group(samples: Sequence[Sample]) -> Counts:
    """Tokens after each answer's first ones, and the seconds in which at least one answer was being decoded."""
    return {
        group: (
            sum(len(sample.ids) - sample.num_first for sample in members),
            sum(stop - start for start, stop in merged_intervals(sample.decode_interval for sample in members)),
        )
        for group, members in _by_group(samples).items()
    }


def decode_rate(samples: Sequence[Sample]) -> float | None:
    """Tokens per second of all groups together, so that long answers count for more than short ones.

    None where no token came after an answer's first ones: nothing was timed.
    """
    groups = decode_by_group(samples).values()
    tokens, seconds = sum(tokens for tokens, _ in groups), sum(seconds for _, seconds in groups)
    return tokens / seconds if seconds > 0 else None


def speedup(ours: Sequence[Sample], base: Sequence[Sample]) -> Estimate:
    """Ratio of the decoding rates, over the groups that both have."""
    return paired(ratio, decode_by_group(ours), decode_by_group(base))


def total_rate(samples: Sequence[Sample]) -> float:
    """All tokens over the time from each group's first submission to its last token (with tower and prefill)."""
    groups = _by_group(samples).values()
    seconds = sum(max(one.last for one in members) - min(one.submitted for one in members) for members in groups)
    return sum(len(sample.ids) for sample in samples) / seconds if seconds > 0 else 0.0


def median_ttft_s(samples: Sequence[Sample]) -> float:
    """Median time from submission to the first token."""
    return median(sample.ttft_s for sample in samples)


def acceptance(samples: Sequence[Sample]) -> tuple[float | None, float | None]:
    """Acceptance rate over all prompts, and accepted tokens per verification; None where no draft token was judged."""
    total = SpeculationStats.of_all([sample.speculation for sample in samples])
    return (total.acceptance_rate, total.mean_accepted_tokens) if total.num_draft_tokens else (None, None)


def merged_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals as sorted, disjoint intervals."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _by_group(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """Samples by group, groups in ascending order."""
    by_group = attrgetter("group")
    return {group: list(members) for group, members in groupby(sorted(samples, key=by_group), by_group)}
