"""Sample: one answer in one mode, with its clock. And what samples of a mode add up to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from vidspec_service.bench.intervals import Interval, covered_s
from vidspec_service.bench.options import Mode
from vidspec_service.engine.types import SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Times are of the monotonic clock, as the asking process saw the tokens come."""

    mode: Mode
    group: int  # prompts of a group were answered together; modes are compared group by group
    prompt: int
    ids: tuple[int, ...]
    prompt_tokens: int
    submitted: float
    first: float
    last: float
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tokens and the seconds that they took."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second; 0 where nothing was timed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def total(works: Iterable[Work]) -> Work:
    """Sums, so that long answers count for more than short ones."""
    works = list(works)
    return Work(tokens=sum(work.tokens for work in works), seconds=sum(work.seconds for work in works))


def decoding_by_group(samples: Sequence[Sample]) -> dict[int, Work]:
    """Tokens after each answer's first, over the time in which at least one answer was being decoded."""
    return {
        group: Work(
            tokens=sum(max(len(sample.ids) - 1, 0) for sample in members),
            seconds=covered_s(decoding_windows(members)),
        )
        for group, members in by_group(samples).items()
    }


def throughput(samples: Sequence[Sample]) -> Work:
    """All tokens, over the time from a group's first submission to its last token: prefill and tower included."""
    groups = by_group(samples).values()
    seconds = sum(max(one.last for one in members) - min(one.submitted for one in members) for members in groups)
    return Work(tokens=sum(len(sample.ids) for sample in samples), seconds=seconds)


def decoding_windows(samples: Iterable[Sample]) -> list[Interval]:
    """From first to last token of each answer."""
    return [(sample.first, sample.last) for sample in samples]


def first_token_s(samples: Sequence[Sample]) -> float:
    """Median time from submission to the first token."""
    return median(sample.first - sample.submitted for sample in samples)


def acceptance_rate(samples: Iterable[Sample]) -> float:
    """Accepted over judged proposals, all prompts together."""
    stats = [sample.speculation for sample in samples]
    judged = sum(one.num_draft_tokens for one in stats)
    return sum(one.num_accepted_tokens for one in stats) / judged if judged else 0.0


def mean_accepted_tokens(samples: Iterable[Sample]) -> float:
    """Accepted proposals per verification forward, the target's own token not counted."""
    stats = [sample.speculation for sample in samples]
    verifications = sum(one.num_verifications for one in stats)
    return sum(one.num_accepted_tokens for one in stats) / verifications if verifications else 0.0


def by_group(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """In order of the groups."""
    groups: dict[int, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.group):
        groups.setdefault(sample.group, []).append(sample)
    return groups
