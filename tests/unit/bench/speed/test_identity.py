"""Forks: which answers differ from the reference, and from which token on."""

from __future__ import annotations

import pytest

from tests.unit.bench.speed.factories import sample
from vidspec_service.bench.speed.identity import (
    find_forks,
    fork_lines,
    is_identical,
    is_identical_to_hf,
    reference_mode,
)
from vidspec_service.bench.speed.options import Mode, SpeedOptions


@pytest.mark.parametrize(
    ("one", "other", "position"), [((1, 2, 3), (1, 9, 3), 1), ((1, 2), (1, 2, 3), 2), ((1,), (2,), 0)]
)
def test_the_first_difference_may_be_an_end(one: tuple[int, ...], other: tuple[int, ...], position: int) -> None:
    (fork,) = find_forks([sample(Mode.OFF, 0, one), sample(Mode.AUTO, 0, other)], Mode.OFF)
    assert fork["position"] == position


@pytest.mark.parametrize(
    ("modes", "reference"),
    [
        (tuple(Mode), Mode.OFF),
        ((Mode.HF, Mode.PARALLEL, Mode.AUTO), Mode.PARALLEL),
        ((Mode.HF,), Mode.HF),
    ],
)
def test_the_reference_is_the_baseline_or_else_the_engine(modes: tuple[Mode, ...], reference: Mode) -> None:
    assert reference_mode(modes) is reference


def test_equal_ids_make_no_fork_and_a_shorter_answer_does() -> None:
    samples = [
        sample(Mode.OFF, 0, (1, 2, 3)),
        sample(Mode.PARALLEL, 0, (1, 2, 3)),
        sample(Mode.AUTO, 0, (1, 2)),
        sample(Mode.OFF, 1, (4, 5)),
        sample(Mode.PARALLEL, 1, (4, 6)),
    ]
    forks = find_forks(samples, Mode.OFF)
    assert [tuple(fork[key] for key in ("mode", "prompt", "position", "expected", "found")) for fork in forks] == [
        (Mode.AUTO, 0, 2, 3, None),
        (Mode.PARALLEL, 1, 1, 5, 6),
    ]
    assert is_identical(SpeedOptions(), forks) is False


def test_stock_transformers_may_differ_without_breaking_our_contract() -> None:
    forks = find_forks([sample(Mode.OFF, 0, (1, 2)), sample(Mode.HF, 0, (1, 3))], Mode.OFF)
    assert is_identical(SpeedOptions(), forks) is True
    assert is_identical_to_hf(SpeedOptions(), forks) is False
    assert is_identical_to_hf(SpeedOptions(temperature=0.8), forks) is None


def test_one_mode_alone_is_not_compared() -> None:
    assert is_identical(SpeedOptions(modes=(Mode.HF, Mode.OFF)), []) is None
    assert is_identical_to_hf(SpeedOptions(modes=(Mode.OFF,)), []) is None
    assert is_identical_to_hf(SpeedOptions(modes=(Mode.HF, Mode.OFF)), []) is True


def test_forks_of_an_hf_that_is_not_compared_hide_none_of_ours() -> None:
    answers = [sample(mode, at, ids) for at in range(20) for mode, ids in ((Mode.OFF, (1,)), (Mode.HF, (2,)))]
    theirs = find_forks(answers, Mode.OFF)
    ours = find_forks([sample(Mode.OFF, 7, (1,)), sample(Mode.AUTO, 7, (2,))], Mode.OFF)
    assert list(fork_lines([*theirs, *ours], is_hf_compared=False)) == [
        "  fork: prompt 7, auto against off, token 0: 2 instead of 1"
    ]
    *told, rest = fork_lines([*theirs, *ours], is_hf_compared=True)
    assert len(told) == 10
    assert "21 forks in all" in rest
    assert len(list(fork_lines(theirs[:10], is_hf_compared=True))) == 10
