"""Which random pair measures a device, and the expected gain of speculation there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.unit.bench.speed.factories import costs
from vidspec_models.synthetic.recipe import SHAPES
from vidspec_service.bench.speed.device import ACCEPTANCES, expected_speedups, fitting_pair

GB = 10**9


@pytest.mark.parametrize(
    ("target_bytes", "draft_bytes", "name"),
    [
        (80 * GB, None, "llava-onevision-7b+0.5b"),
        (22 * GB, None, "llava-onevision-7b+0.5b"),
        (20 * GB, 8 * GB, "llava-onevision-7b+0.5b"),
        (20 * GB, None, "llava-onevision-7b-of-14-layers+0.5b"),
        (8 * GB, None, "llava-onevision-7b-of-4-layers+0.5b"),
        (80 * GB, GB // 2, "small"),
        (0, None, "small"),
    ],
)
def test_the_largest_pair_that_fits_is_taken(target_bytes: int, draft_bytes: int | None, name: str) -> None:
    assert fitting_pair(target_bytes, draft_bytes) == name


def test_a_smaller_pair_has_the_width_of_the_whole_one_or_its_proportions() -> None:
    whole, few, small = (SHAPES[fitting_pair(size)].target for size in (80 * GB, 8 * GB, 0))
    assert (few.hidden_size, few.num_heads, few.vocabulary) == (whole.hidden_size, whole.num_heads, whole.vocabulary)
    assert whole.hidden_size / small.hidden_size == whole.intermediate_size / small.intermediate_size == 8
    assert small.num_heads // small.num_kv_heads == whole.num_heads // whole.num_kv_heads


def gains(
    draft_s: float = 0.001, row_s: float = 0.0001, *, overlap: bool = True, stride_s: float | None = None
) -> dict[float, float]:
    probed = costs(target_s=0.010, row_s=row_s, draft_s=draft_s)
    assert probed.draft is not None
    return expected_speedups(replace(probed.target, stride_s=stride_s), probed.draft, overlap=overlap)


def test_the_expected_gain_is_the_speed_models_and_grows_with_acceptance() -> None:
    found, in_turns = gains(), gains(overlap=False)
    assert tuple(found) == ACCEPTANCES == (0.7, 0.8, 0.9)
    assert 1.5 < found[0.7] < found[0.8] < found[0.9] < 10
    assert all(1.0 < in_turns[each] < found[each] for each in ACCEPTANCES)


def test_a_draft_slower_than_its_target_is_said_to_gain_nothing() -> None:
    assert max(gains(draft_s=0.020, row_s=0.010).values()) <= 1.0


def test_the_gain_is_over_a_target_that_makes_several_tokens_in_one_call_where_it_can() -> None:
    assert gains(stride_s=0.005) == pytest.approx({each: gain / 2 for each, gain in gains().items()})


def test_random_models_are_measured_where_pyav_is_missing() -> None:
    """Without a video nothing needs it, and a GPU machine may not have it."""
    code = "import sys; sys.modules['av'] = None; import vidspec_service.bench.speed.device, tests.gpu.test_engine"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
