"""The two runs of `bench speed`: on checkpoints, and with `--random-weights` (real shapes, imposed acceptance).

The second one has three phases, so that a device holds one target at a time: stock `generate`, the target alone, both
models. What the target says alone is written down and becomes what the draft's oracle proposes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from vidspec_models.synthetic.recipe import SHAPES, Oracle, Recipe
from vidspec_service.bench.common.child import call_in_child
from vidspec_service.bench.common.facts import Provenance
from vidspec_service.bench.common.report import Row, Tell
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.speed.comparison import compare
from vidspec_service.bench.speed.costs import ProbedCosts, measure_round_trip, probe_costs, typical_context
from vidspec_service.bench.speed.options import Mode, SpeedOptions, SyntheticOptions
from vidspec_service.bench.speed.report import Measurements
from vidspec_service.bench.speed.roofline import roofline, synthetic_notes
from vidspec_service.bench.speed.worker import Forwards, time_copies
from vidspec_service.engine.config import EngineConfig, WorkerConfig

_ROWS, _RANDOM_ROWS = (1, 2, 5, 9, 17), (1, 2, 4, 9, 17)


def measure_speed(options: SpeedOptions, pair: EngineConfig, command: str, tell: Tell) -> Measurements:
    """`pair` is the engine with its draft; of random models it says devices and types, their names are not looked at.

    Raises ConfigError and EngineError.
    """
    provenance, random = Provenance.now(command), options.synthetic
    with TemporaryDirectory(prefix="vidspec-random-") as folder:
        if random is None:
            comparison = asyncio.run(compare(options, pair, tell))
        else:
            files = _Files(Path(folder), options, random)
            pair = replace(pair, target=files.worker(pair.target, "target"), draft=files.draft(pair))
            comparison = asyncio.run(compare(options, pair, tell, phases(options.modes), files.write_references))
        tell("timing the channel", 0, 0)
        round_trip = measure_round_trip()
        tell("timing forwards", 0, 0)
        costs = probe_costs(pair, typical_context(comparison.samples), _ROWS if random is None else _RANDOM_ROWS)
        if random is not None:
            tell("timing memory", 0, 0)
    return Measurements(
        comparison=comparison,
        round_trip=round_trip,
        costs=costs,
        provenance=provenance,
        synthetic=None if random is None else _facts(random, costs),
    )


@dataclass(frozen=True, slots=True)
class _Files:
    """The recipes that workers load instead of checkpoints, and the target's answers for the oracle."""

    folder: Path
    options: SpeedOptions
    asked: SyntheticOptions

    @property
    def references(self) -> Path:
        return self.folder / "references.json"

    def worker(self, config: WorkerConfig, role: str) -> WorkerConfig:
        """The same worker with a recipe of its own."""
        seed = self.options.sampling.seed
        oracle = Oracle(acceptance=self.asked.acceptance, seed=seed, references=str(self.references))
        recipe = Recipe(pair=self.asked.shape, role=role, seed=seed, oracle=oracle if role == "draft" else None)
        recipe.write(self.folder / role)
        return replace(config, model=str(self.folder / role), revision=None)

    def draft(self, pair: EngineConfig) -> WorkerConfig | None:
        return self.worker(pair.draft, "draft") if pair.draft is not None else None

    def write_references(self, samples: Sequence[Sample]) -> None:
        """What the target says when it is alone."""
        said = {str(sample.prompt): sample.ids for sample in samples if sample.mode == Mode.OFF}
        self.references.write_text(json.dumps(said), encoding="utf-8")


def phases(modes: Sequence[Mode]) -> list[tuple[Mode, ...]]:
    """Modes that run together; `off` before those that need what it said."""
    members = ((Mode.HF,), (Mode.OFF,), tuple(mode for mode in Mode if mode.needs_draft))
    found = [tuple(mode for mode in members_of_one if mode in modes) for members_of_one in members]
    return [phase for phase in found if phase]


def _facts(asked: SyntheticOptions, costs: ProbedCosts) -> Row:
    """What was made up: shapes with random weights, embeddings for a video, acceptance by an oracle."""
    shapes = SHAPES[asked.shape]
    probed = {"target": (shapes.target, costs.alone)}
    if costs.draft is not None:
        probed["draft"] = (shapes.draft, costs.draft)
    return {
        "shape": asked.shape,
        "acceptance": asked.acceptance,  # imposed; the table's alpha is what came out
        "video_tokens": shapes.video_tokens,
        "text_tokens": shapes.text_tokens,
        "rooflines": {
            role: roofline(shape, forwards, costs.context, _bandwidth(forwards))
            for role, (shape, forwards) in probed.items()
        },
        "notes": synthetic_notes(shapes, {role: forwards.device for role, (_, forwards) in probed.items()}),
    }


def _bandwidth(forwards: Forwards) -> float:
    """Of the device of these forwards, with as many threads; of several, one reads at a time."""
    return call_in_child(time_copies, forwards.device.partition(",")[0], forwards.threads)
