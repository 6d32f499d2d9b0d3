"""Roofline: how near a step comes to the time that reading its bytes takes. What is said of random models. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from vidspec_models.synthetic.recipe import PairShape, Shape
from vidspec_service.bench.common.report import Row, column, table
from vidspec_service.bench.speed.worker import Forwards

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


def roofline(shape: Shape, forwards: Forwards, context: int, bandwidth: float) -> Row:
    """A model's step of one row: what it must read, of weights and of the context's keys and values, and its time.

    `bandwidth`: bytes per second, of a large copy on the same device.
    """
    itemsize = _ITEMSIZE[forwards.dtype]
    weight_bytes, num_bytes = shape.step_bytes(0, itemsize), shape.step_bytes(context, itemsize)
    step_s = forwards.seconds[1]
    return {
        "source": shape.source,  # the checkpoint whose shape this is
        "weight_bytes": weight_bytes,
        "cache_bytes": num_bytes - weight_bytes,
        "bandwidth": bandwidth,
        "bytes_s": num_bytes / bandwidth,
        "step_s": step_s,
        "of_roofline": num_bytes / bandwidth / step_s,  # 1: the step takes as long as its bytes
        "over_weights": step_s * bandwidth / weight_bytes,  # over the time of reading the weights alone
    }


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


def roofline_table(rooflines: Mapping[str, Row]) -> Table:
    """A line a model."""
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
