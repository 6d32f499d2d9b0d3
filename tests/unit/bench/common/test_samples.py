"""Figures from samples: rates over groups, overlapping windows, acceptance rate over all prompts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FINISHED, PROMPT_READY, FakeEngine
from tests.unit.bench.speed.factories import sample, stats
from vidspec_models.request import GenerationRequest
from vidspec_service.bench.common.generation import generate_sample
from vidspec_service.bench.common.samples import (
    acceptance,
    decode_by_group,
    decode_rate,
    median_ttft_s,
    merged_intervals,
    speedup,
    total_rate,
)
from vidspec_service.bench.common.scenes import about_video
from vidspec_service.bench.speed.options import Mode
from vidspec_service.engine.types import TextDelta


def test_a_union_joins_what_touches_and_keeps_what_does_not() -> None:
    assert merged_intervals([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert merged_intervals([]) == []


def test_decoding_leaves_out_the_first_token_and_weighs_by_length() -> None:
    samples = [sample(Mode.OFF, 0, tuple(range(11)), per_token_s=0.01), sample(Mode.OFF, 1, (1, 2), per_token_s=0.1)]
    assert [tokens for tokens, _ in decode_by_group(samples).values()] == [10, 1]
    assert decode_rate(samples) == pytest.approx(11 / 0.2)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20), pace_s=st.floats(1e-3, 1.0))
def test_tokens_that_came_at_the_first_time_took_no_time_of_decoding(sizes: list[int], pace_s: float) -> None:
    """The rate counts only tokens after the first delivery, however many tokens that had."""
    ids, times = tuple(range(sum(sizes))), tuple(0.1 + pace_s * sum(sizes[1 : 1 + at]) for at in range(len(sizes)))
    found = [replace(sample(Mode.PARALLEL, 0, ids), times=times, num_first=sizes[0])]
    assert decode_by_group(found)[0][0] == sum(sizes[1:])
    assert decode_rate(found) == (pytest.approx(1 / pace_s) if sizes[1:] else None)


def test_the_engine_is_asked_how_many_tokens_came_first() -> None:
    deltas = [TextDelta(text="", num_tokens=len(ids), ids=ids) for ids in ((1, 2, 3), (4,), (5, 6))]
    request = GenerationRequest(request_id="one", turns=about_video("What?"), videos=(), max_tokens=9)
    found = asyncio.run(generate_sample(FakeEngine(PROMPT_READY, *deltas, FINISHED), request))
    assert (found.ids, found.num_first, len(found.times)) == ((1, 2, 3, 4, 5, 6), 3, 3)
    assert decode_by_group([found])[0][0] == 3


def test_a_speed_up_is_over_the_groups_that_both_have() -> None:
    base = [sample(Mode.OFF, group, tuple(range(11)), per_token_s=0.01) for group in range(8)]
    ours = [sample(Mode.AUTO, group, tuple(range(11)), per_token_s=0.0025) for group in range(9)]
    assert speedup(ours, base).value == pytest.approx(4.0)
    assert speedup(ours, base).interval == pytest.approx((4.0, 4.0))
    assert speedup(ours, base[:1]).value == pytest.approx(4.0)
    assert speedup(ours, base[:1]).interval is None
    nothing = [sample(Mode.OFF, group, (1,)) for group in range(2)]
    for without in ([], nothing):
        assert (speedup(ours, without).value, speedup(without, without).interval) == (None, None)


def test_requests_at_once_share_their_time() -> None:
    together = [sample(Mode.OFF, prompt, tuple(range(11)), group=0) for prompt in range(4)]
    assert decode_rate(together) == pytest.approx(40 / 0.1)
    assert total_rate(together) == pytest.approx(44 / 0.2)


def test_an_answer_of_one_token_has_no_decoding_rate() -> None:
    assert decode_rate([sample(Mode.OFF, 0, (7,))]) is None


def test_the_first_token_is_timed_from_submission() -> None:
    assert median_ttft_s([sample(Mode.OFF, i, (1, 2), at=10.0 * i) for i in range(3)]) == pytest.approx(0.1)


def test_acceptance_is_taken_over_all_prompts_together() -> None:
    samples = [
        sample(Mode.PARALLEL, 0, (1, 2), stats=stats(judged=10, accepted=9, verifications=3)),
        sample(Mode.PARALLEL, 1, (1, 2), stats=stats(judged=30, accepted=15, verifications=9)),
    ]
    assert acceptance(samples) == (24 / 40, 24 / 12)
    assert acceptance([sample(Mode.OFF, 0, (1,))]) == (None, None)
