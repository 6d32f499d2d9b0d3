"""SpeedReport: all that `bench speed` says, as it goes into the JSON file; tables and plots are drawn from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vidspec_service.bench.activity import ForwardFacts
from vidspec_service.bench.costs import ProbedCosts
from vidspec_service.bench.facts import Hardware
from vidspec_service.bench.identity import Fork
from vidspec_service.bench.options import BASELINE, Mode
from vidspec_service.bench.roofline import SyntheticFacts
from vidspec_service.bench.round_trip import RoundTrip
from vidspec_service.bench.samples import Sample
from vidspec_service.engine.types import SamplingParams, SpeculationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """One worker while answers of one mode were decoded."""

    idle_ratio: float | None
    forwards: ForwardFacts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeResult:
    """One mode. Rates of decoding leave out each answer's first token, throughput leaves out nothing."""

    tokens_per_s: float
    speedup_vs_off: float | None
    speedup_interval: tuple[float, float] | None  # 95 %, bootstrap over prompts
    throughput_tokens_per_s: float
    throughput_vs_off: float | None
    ttft_s: float
    num_tokens: int
    acceptance_rate: float | None
    mean_accepted_tokens: float | None
    predicted_speedup: float | None
    predicted_minimum: int | None
    predicted_window: int | None
    fraction_of_prediction: float | None
    workers: Mapping[str, WorkerUse]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What one worker ran."""

    model: str
    device: str
    dtype: str
    threads: int
    rows_are_invariant: bool | None  # None for stock transformers, which does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """One answer, so that every figure can be made again from the file."""

    mode: Mode
    group: int
    prompt: int
    num_tokens: int
    prompt_tokens: int
    ttft_s: float
    decode_s: float
    speculation: SpeculationStats

    @classmethod
    def of(cls, sample: Sample) -> SampleFacts:
        return cls(
            mode=sample.mode,
            group=sample.group,
            prompt=sample.prompt,
            num_tokens=len(sample.ids),
            prompt_tokens=sample.prompt_tokens,
            ttft_s=sample.first - sample.submitted,
            decode_s=sample.last - sample.first,
            speculation=sample.speculation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReport:
    """`cost_ratio` is c = T_target(1) / T_draft(1); `identical` speaks of the engine's modes, ids not text."""

    bench: str = "speed"
    created: str
    command: str
    baseline: str
    hardware: Hardware
    versions: Mapping[str, str]
    models: Mapping[str, ModelFacts]
    prompts: int
    task: str
    max_tokens: int
    sampling: SamplingParams
    concurrency: int
    modes: Mapping[Mode, ModeResult]
    cost_ratio: float | None
    costs: ProbedCosts
    channel_round_trip: RoundTrip
    identical: bool | None
    identical_to_hf: bool | None
    forks: tuple[Fork, ...]
    idle_workers_cpu: float
    load_average_before: float
    samples: tuple[SampleFacts, ...]
    synthetic: SyntheticFacts | None = None  # of random models only

    def to_json(self) -> str:
        """As written to the file."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(self.to_json(), encoding="utf-8")


def baseline_text(threads: int) -> str:
    """What speed-ups are relative to, in words."""
    return f"{BASELINE}: the target alone in the same engine, without a draft, {threads} threads"
