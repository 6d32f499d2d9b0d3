"""Did every mode give the same token ids? Where not: which prompt, and at which token the two part. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vidspec_service.bench.options import BASELINE, Mode
from vidspec_service.bench.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Two modes part at `position`; None where one of them has ended."""

    prompt: int
    mode: Mode
    reference: Mode
    position: int
    expected: int | None
    found: int | None


def reference_mode(modes: Sequence[Mode]) -> Mode:
    """What the others are compared with: the baseline if it ran, else the engine's first, else the only one."""
    engine_modes = [mode for mode in modes if mode is not Mode.HF]
    if BASELINE in engine_modes or not engine_modes:
        return BASELINE if BASELINE in engine_modes else modes[0]
    return engine_modes[0]


def find_forks(samples: Sequence[Sample], reference: Mode) -> list[Fork]:
    """One entry for every answer that differs from the reference's answer to the same prompt."""
    expected = {sample.prompt: sample.ids for sample in samples if sample.mode is reference}
    forks = []
    for sample in samples:
        ids = expected.get(sample.prompt)
        if ids is None or ids == sample.ids:
            continue
        position = first_difference(ids, sample.ids)
        forks.append(
            Fork(
                prompt=sample.prompt,
                mode=sample.mode,
                reference=reference,
                position=position,
                expected=ids[position] if position < len(ids) else None,
                found=sample.ids[position] if position < len(sample.ids) else None,
            )
        )
    return forks


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token in which two different answers differ."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
