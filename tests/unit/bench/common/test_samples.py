"""What samples add up to: rates over groups, windows that overlap, acceptance over all prompts."""

from __future__ import annotations

import pytest

from tests.unit.bench.speed.worlds import sample, stats
from vidspec_service.bench.common.samples import (
    decoding,
    decoding_by_group,
    first_token_s,
    throughput,
    total_speculation,
    union,
)
from vidspec_service.bench.speed.options import Mode


def test_a_union_joins_what_touches_and_keeps_what_does_not() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert union([]) == []


def test_decoding_leaves_out_the_first_token_and_weighs_by_length() -> None:
    samples = [sample(Mode.OFF, 0, tuple(range(11)), per_token_s=0.01), sample(Mode.OFF, 1, (1, 2), per_token_s=0.1)]
    assert [work.tokens for work in decoding_by_group(samples).values()] == [10, 1]
    assert decoding(samples).rate == pytest.approx(11 / 0.2)


def test_requests_at_once_share_their_time() -> None:
    together = [sample(Mode.OFF, prompt, tuple(range(11)), group=0) for prompt in range(4)]
    assert decoding(together).rate == pytest.approx(40 / 0.1)
    assert throughput(together).rate == pytest.approx(44 / 0.2)


def test_an_answer_of_one_token_has_no_decoding_rate() -> None:
    assert decoding([sample(Mode.OFF, 0, (7,))]).rate == 0.0


def test_the_first_token_is_timed_from_submission() -> None:
    assert first_token_s([sample(Mode.OFF, i, (1, 2), at=10.0 * i) for i in range(3)]) == pytest.approx(0.1)


def test_acceptance_is_taken_over_all_prompts_together() -> None:
    samples = [
        sample(Mode.PARALLEL, 0, (1, 2), stats=stats(judged=10, accepted=9, verifications=3)),
        sample(Mode.PARALLEL, 1, (1, 2), stats=stats(judged=30, accepted=15, verifications=9)),
    ]
    assert total_speculation(samples).acceptance_rate == 24 / 40
    assert total_speculation(samples).mean_accepted_tokens == 24 / 12
    assert total_speculation([sample(Mode.OFF, 0, (1,))]).acceptance_rate == 0.0
