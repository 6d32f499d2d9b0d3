"""PruningReport: all that `bench pruning` says, as it goes into the JSON file; table and plot are made from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vidspec_service.bench.facts import Hardware
from vidspec_service.bench.pruning.following import FollowingThird
from vidspec_service.bench.pruning.statistics import Estimate
from vidspec_service.bench.pruning.timing import LongClip

ALL_TASKS = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningResult:
    """One strategy at one ratio on one task. Intervals: 95 %, bootstrap over clips."""

    strategy: str
    ratio: float
    task: str
    acceptance_rate: float
    ci_low: float
    ci_high: float
    mean_accepted_tokens: float  # per verification of `window` proposals, serial schedule
    draft_prefill_s: float  # median
    tokens_per_s: float
    tokens_per_s_from: str  # "engine" or "speed model"
    over_unpruned: Estimate  # acceptance over that of `none`
    less_than_hippo: Estimate | None  # hippo's acceptance at this ratio less this one's: above 0, hippo is better
    selection_s: float  # median
    video_tokens: float  # mean, that the draft sees
    num_tokens: int  # judged


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What was measured."""

    model: str
    device: str
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningReport:
    """`results` has every strategy, ratio and task; ratio 0 is `none` for all of them."""

    bench: str = "pruning"
    created: str
    command: str
    baseline: str
    hardware: Hardware
    versions: Mapping[str, str]
    models: Mapping[str, ModelFacts]
    clips: int
    window: int
    max_tokens: int
    results: tuple[PruningResult, ...]
    long_clip: LongClip
    following: tuple[FollowingThird, ...] = ()
    following_every: int | None = None
    load_average_before: float

    def of(self, strategy: str, ratio: float, task: str = ALL_TASKS) -> PruningResult | None:
        """One of the results."""
        wanted = (strategy, ratio, task)
        return next((each for each in self.results if (each.strategy, each.ratio, each.task) == wanted), None)

    def to_json(self) -> str:
        """As written to the file."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(self.to_json(), encoding="utf-8")
