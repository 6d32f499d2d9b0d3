"""Roofline: how near a step comes to the time that reading its bytes takes. What is said of random models. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from vidspec_models.synthetic.shapes import PairShape, Shape
from vidspec_service.bench.common.report import column, table
from vidspec_service.bench.speed.worker import Forwards

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One model's step of one row: what it must read, and how long that would take at the measured bandwidth."""

    source: str  # the checkpoint whose shape this is
    weight_bytes: int
    cache_bytes: int  # keys and values of the context
    bandwidth: float  # bytes per second, of a large copy on the same device
    step_s: float

    @property
    def fraction(self) -> float:
        """1: the step takes as long as its bytes."""
        return (self.weight_bytes + self.cache_bytes) / self.bandwidth / self.step_s

    @property
    def over_weights(self) -> float:
        """The step's time over the time that reading the weights alone would take."""
        return self.step_s * self.bandwidth / self.weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticFacts:
    """What was made up: shapes with random weights, embeddings for a video, acceptance by an oracle."""

    shape: str
    acceptance: float  # imposed; the table's alpha is what came out
    video_tokens: int
    text_tokens: int
    rooflines: Mapping[str, Roofline]  # by role
    notes: tuple[str, ...]


def roofline(shape: Shape, forwards: Forwards, context: int, bandwidth: float) -> Roofline:
    """From a probed step and a probed bandwidth."""
    itemsize = _ITEMSIZE[forwards.dtype]
    weight_bytes = shape.step_bytes(0, itemsize)
    return Roofline(
        source=shape.source,
        weight_bytes=weight_bytes,
        cache_bytes=shape.step_bytes(context, itemsize) - weight_bytes,
        bandwidth=bandwidth,
        step_s=forwards.seconds[1],
    )


def synthetic_notes(pair: PairShape, devices: Mapping[str, str]) -> tuple[str, ...]:
    """What a reader must know before comparing these figures with any others."""
    notes = [
        f"weights are random; {pair.num_frames} x {pair.frame_tokens} video tokens are random embeddings, "
        "the vision tower is skipped",
        "the draft computes all its forwards; then an oracle proposes the target's own token with that probability",
        "modes ran one after the other: hf, off, then those that speculate",
    ]
    if len(set(devices.values())) == 1:
        notes.append(f"target and draft share {devices['target']}: each slows the other down")
    return tuple(notes)


def roofline_table(rooflines: Mapping[str, Roofline]) -> Table:
    """A line a model."""
    rows = [
        {
            "model": role,
            **dataclasses.asdict(line),
            "bytes_s": (line.weight_bytes + line.cache_bytes) / line.bandwidth,
            "fraction": line.fraction,
            "over_weights": line.over_weights,
        }
        for role, line in rooflines.items()
    ]
    columns = {
        "model": column("model"),
        "weights GB": column("weight_bytes", "{:.3f}", 1e-9),
        "KV GB": column("cache_bytes", "{:.3f}", 1e-9),
        "GB/s": column("bandwidth", "{:.0f}", 1e-9),
        "bytes ms": column("bytes_s", "{:.3f}", 1000),
        "T(1) ms": column("step_s", "{:.3f}", 1000),
        "of roofline": column("fraction", "{:.0%}"),
        "T(1) / weights": column("over_weights", "{:.2f}x"),
    }
    return table("One row's bytes over the bandwidth of a large copy", columns, rows)
