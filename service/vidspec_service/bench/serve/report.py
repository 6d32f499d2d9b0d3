"""ServeReport: all that `bench serve` says, as it goes into the JSON file; tables and plots are made from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vidspec_service.bench.facts import Hardware
from vidspec_service.bench.serve.exchange import Outcome
from vidspec_service.bench.serve.soak import SoakResult
from vidspec_service.bench.serve.statistics import LoadResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """`outcomes` has every request by load, so that every figure can be made again from the file."""

    bench: str = "serve"
    created: str
    command: str
    baseline: str = "none: absolute figures of this server on this machine, its client on the same one if local"
    hardware: Hardware
    versions: Mapping[str, str]
    model: str
    server: str  # "its own", or the address
    settings: Mapping[str, float | int | bool | None]
    loads: tuple[LoadResult, ...]
    soak: SoakResult | None
    outcomes: Mapping[str, tuple[Outcome, ...]]
    load_average_before: float

    @property
    def num_lost(self) -> int:
        """Requests without an answer or a proper refusal, over all loads."""
        return sum(load.num_lost for load in self.loads)

    def to_json(self) -> str:
        """As written to the file."""
        content = dataclasses.asdict(self)
        if self.soak is not None:
            content["soak"]["growth"] = self.soak.growth
        return json.dumps(content, indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(self.to_json(), encoding="utf-8")
