"""Random models of real shapes: their recipes, the acceptance imposed on them, and how near a step is to the roofline.

The modes run in phases, so that a device holds one target at a time: stock `generate`, the target alone, both models.
The answers of the target alone are saved; the draft's oracle proposes tokens from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from vidspec_models.synthetic.recipe import SHAPES, WEIGHT_BYTES, ModelShape, Oracle, PairShape, Recipe
from vidspec_service.bench.common.report import Row, column, table
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.speed.costs import ForwardTimes, ProbedCosts
from vidspec_service.bench.speed.options import Mode, SpeedOptions
from vidspec_service.engine.config import EngineConfig, WorkerConfig

RANDOM_ROWS = (1, 2, 4, 9, 17)  # row counts at which the target's forwards are timed


@dataclass(frozen=True, slots=True)
class RandomPair:
    """The recipes that workers load instead of checkpoints, and the target's answers for the oracle."""

    folder: Path
    options: SpeedOptions

    @property
    def references(self) -> Path:
        return self.folder / "references.json"

    def replace_models(self, pair: EngineConfig) -> EngineConfig:
        """The same workers, each with a recipe of its own."""
        draft = None if pair.draft is None else self.worker(pair.draft, "draft")
        return replace(pair, target=self.worker(pair.target, "target"), draft=draft)

    def worker(self, config: WorkerConfig, role: str) -> WorkerConfig:
        """The same worker with a recipe of its own."""
        options = self.options
        oracle = Oracle(acceptance=options.acceptance, seed=options.seed, references=str(self.references))
        recipe = Recipe(pair=options.shape, role=role, seed=options.seed, oracle=oracle if role == "draft" else None)
        recipe.write(self.folder / role)
        return replace(config, model=str(self.folder / role), revision=None)

    def write_references(self, samples: Sequence[Sample]) -> None:
        """Save the answers of the target alone, for the draft's oracle."""
        answers = {str(sample.prompt): sample.ids for sample in samples if sample.mode == Mode.OFF}
        self.references.write_text(json.dumps(answers), encoding="utf-8")


def phases(modes: Sequence[Mode]) -> list[tuple[Mode, ...]]:
    """Modes that run together; `off` comes before the speculating modes, whose oracle needs its answers."""
    members = ((Mode.HF,), (Mode.OFF,), tuple(mode for mode in Mode if mode.needs_draft))
    found = [tuple(mode for mode in members_of_one if mode in modes) for members_of_one in members]
    return [phase for phase in found if phase]


def synthetic_facts(options: SpeedOptions, costs: ProbedCosts) -> Row:
    """The synthetic parts of a run: shapes with random weights, embeddings for a video, an oracle's acceptance rate."""
    shapes = SHAPES[options.shape]
    probed = {"target": (shapes.target, costs.alone)}
    if costs.draft is not None:
        probed["draft"] = (shapes.draft, costs.draft)
    return {
        "shape": options.shape,
        "acceptance": options.acceptance,  # imposed; alpha in the table is what was measured
        "video_tokens": shapes.video_tokens,
        "text_tokens": shapes.text_tokens,
        "rooflines": {role: roofline(*probe, costs.context) for role, probe in probed.items()},
        "notes": synthetic_notes(shapes, {role: forwards.device for role, (_, forwards) in probed.items()}),
    }


def roofline(shape: ModelShape, forwards: ForwardTimes, context: int) -> Row:
    """A model's step of one row: bytes that it must read (weights, keys and values of the context), and its time."""
    assert forwards.bandwidth is not None, "timed without copies"
    weight_bytes = int(WEIGHT_BYTES[forwards.dtype] * shape.step_parameters())
    cache_bytes = context * forwards.token_bytes
    num_bytes = weight_bytes + cache_bytes
    step_s, bandwidth = forwards.seconds[1], forwards.bandwidth
    return {
        "source": shape.source,  # the checkpoint whose shape this is
        "weight_bytes": weight_bytes,
        "cache_bytes": cache_bytes,
        "bandwidth": bandwidth,
        "bytes_s": num_bytes / bandwidth,
        "step_s": step_s,
        "of_roofline": num_bytes / bandwidth / step_s,  # 1: the step takes as long as its bytes
        "over_weights": step_s * bandwidth / weight_bytes,  # step time over the time to read only the weights
    }


def synthetic_notes(pair: PairShape, devices: Mapping[str, str]) -> tuple[str, ...]:
    """What a reader must know before comparing these figures with any others."""
    notes = [
        f"weights are random; {pair.num_frames} x {pair.frame_tokens} video tokens are random embeddings, "
        "the vision tower is skipped",
        "the draft computes all its forwards; then an oracle proposes the target's token with the imposed probability",
        "modes ran one after the other: hf, off, then those that speculate",
    ]
    if len(set(devices.values())) == 1:
        notes.append(f"target and draft share {devices['target']}: each slows the other down")
    return tuple(notes)


def roofline_table(rooflines: Mapping[str, Row]) -> Table:
    """A table with one row for each model."""
    columns = {
        "model": column("model"),
        "weights GB": column("weight_bytes", "{:.3f}", 1e-9),
        "KV GB": column("cache_bytes", "{:.3f}", 1e-9),
        "GB/s": column("bandwidth", "{:.0f}", 1e-9),
        "bytes ms": column("bytes_s", "{:.3f}", 1000),
        "T(1) ms": column("step_s", "{:.3f}", 1000),
        "of roofline": column("of_roofline", "{:.0%}"),
        "T(1) / weights": column("over_weights", "{:.2f}x"),
    }
    rows = [{"model": role, **line} for role, line in rooflines.items()]
    return table("One row's bytes over the bandwidth of a large copy", columns, rows)
