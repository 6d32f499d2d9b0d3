"""Did every mode give the same token ids? If not: for which prompt, and from which token on do they differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from vidspec_service.bench.common.report import Row
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.speed.options import BASELINE, Mode, SpeedOptions

_MOST_FORKS = 10


def reference_mode(modes: Sequence[Mode]) -> Mode:
    """The mode that others are compared with: the baseline if it ran, else the engine's first, else the only one."""
    engine_modes = [mode for mode in modes if mode is not Mode.HF]
    return BASELINE if BASELINE in engine_modes else (engine_modes or modes)[0]


def find_forks(samples: Sequence[Sample], reference: Mode) -> list[Row]:
    """One entry for every answer that differs from the reference's answer to the same prompt."""
    expected = {sample.prompt: sample.ids for sample in samples if sample.mode == reference}
    forks = []
    for sample in samples:
        ids = expected.get(sample.prompt)
        if ids is None or ids == sample.ids:
            continue
        pairs = enumerate(zip_longest(ids, sample.ids))  # None: one answer has ended
        position, (wanted, found) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
        forks.append(
            {
                "prompt": sample.prompt,
                "mode": sample.mode,
                "reference": reference,
                "position": position,
                "expected": wanted,
                "found": found,
            }
        )
    return forks


def is_identical(options: SpeedOptions, forks: Sequence[Row]) -> bool | None:
    """Did the engine's modes agree? None if there was nothing to compare."""
    if len([mode for mode in options.modes if mode is not Mode.HF]) < 2:
        return None
    return all(fork["mode"] == Mode.HF for fork in forks)


def is_identical_to_hf(options: SpeedOptions, forks: Sequence[Row]) -> bool | None:
    """Did `hf` agree with the engine? None if not compared, or when sampling: transformers draws its own numbers."""
    if Mode.HF not in options.modes or len(options.modes) < 2 or options.temperature > 0:
        return None
    return not any(fork["mode"] == Mode.HF for fork in forks)


def fork_lines(forks: Sequence[Row], *, is_hf_compared: bool) -> Iterator[str]:
    """Report lines for the first few forks; forks of `hf` only if `hf` is compared."""
    shown = [fork for fork in forks if fork["mode"] != Mode.HF or is_hf_compared]
    for fork in shown[:_MOST_FORKS]:
        form = "  fork: prompt {prompt}, {mode} against {reference}, token {position}: {found} instead of {expected}"
        yield form.format(**fork)
    if len(shown) > _MOST_FORKS:
        yield f"  ... {len(shown)} forks in all; the JSON file lists them"
