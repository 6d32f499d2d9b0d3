"""The simulated cluster's figures match its engines' speeds, and its hash ring moves no caller without need."""

from __future__ import annotations

import asyncio
import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FINISHED, PROMPT_READY, FakeEngine
from vidspec_service.bench.cluster import run
from vidspec_service.bench.cluster.run import ClusterOptions, calibrate, scenario_at, simulate
from vidspec_service.bench.cluster.simulation import EngineTimes, Ring, Routing, Scenario, Simulation, SimulationResult
from vidspec_service.bench.common.report import Row
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.types import TextDelta

TIMES = EngineTimes(prefill_s=1.0, prefill_again_s=0.25, rates={1: 100.0, 2: 160.0, 4: 200.0}, start_s=5.0)
FEW = Scenario(num_engines=4, num_callers=8, pause_s=5.0, warm_up_s=0.0, seconds=400.0)
OPTIONS = ClusterOptions(num_engines=10, num_callers=500, seconds=100.0)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Every situation, simulated."""
    return simulate(TIMES, OPTIONS, lambda *_: None)


def play(scenario: Scenario, routing: Routing = Routing.RING, times: EngineTimes = TIMES) -> SimulationResult:
    return Simulation(times, scenario, routing).run()


def test_an_engine_is_timed_about_new_clips_known_ones_and_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(PROMPT_READY, *(TextDelta(text="", num_tokens=1, ids=(token,)) for token in range(3)), FINISHED)
    monkeypatch.setattr(run, "new_engine", lambda _: nullcontext(engine))
    times = asyncio.run(calibrate(EngineConfig(target=WorkerConfig(model="bundled")), lambda *_: None))
    assert tuple(times.rates) == (1, 2, 4, 8, 16)
    assert min(times.prefill_s, times.prefill_again_s, *times.rates.values()) > 0
    clips = [f"clip {number}" for number in range(18)]
    asked = [*clips[16:], *clips[:16], *clips[:16], *(clip for number in times.rates for clip in clips[:number])]
    assert [request.videos[0].key for request in engine.requests] == asked
    assert all(request.ignore_eos for request in engine.requests)


def test_ctrl_c_leaves_the_situations_that_were_simulated() -> None:
    (row,) = simulate(TIMES, OPTIONS, lambda *_: signal.raise_signal(signal.SIGINT))
    assert row["tokens_per_s"] > 0


@pytest.mark.parametrize(("num_running", "rate"), [(1, 100.0), (2, 160.0), (3, 180.0), (4, 200.0), (50, 200.0)])
def test_rates_between_the_measured_ones_are_in_proportion(num_running: int, rate: float) -> None:
    assert TIMES.rate(num_running) == pytest.approx(rate)


def test_a_lone_caller_waits_for_the_prompt_and_for_nothing_else() -> None:
    alone = replace(FEW, num_engines=1, num_callers=1, questions=1)
    found = play(alone)
    assert found.first_token_p50_s == pytest.approx(TIMES.prefill_s)
    assert found.first_token_p99_s == pytest.approx(TIMES.prefill_s)
    assert found.moved == found.handed_over == 0


def test_an_engine_that_never_rests_makes_as_many_tokens_as_it_can() -> None:
    busy = replace(FEW, num_engines=1, num_callers=4, pause_s=1e-6, questions=10**6, warm_up_s=50.0)
    free = replace(TIMES, prefill_s=0.0, prefill_again_s=0.0)
    assert play(busy, times=free).tokens_in_time / busy.seconds == pytest.approx(200.0, rel=0.03)


def test_answers_that_begin_too_late_do_not_count() -> None:
    crowd = replace(FEW, num_engines=1, num_callers=40, pause_s=0.1, max_ongoing=1000)
    patient = play(replace(crowd, patience_s=1e9))
    assert play(replace(crowd, patience_s=0.5)).tokens_in_time < patient.tokens_in_time


def test_where_nobody_gets_a_token_there_is_no_time_to_the_first() -> None:
    slow = replace(TIMES, prefill_s=1e4, prefill_again_s=1e4)
    found = play(FEW, times=slow)
    assert (found.answers, found.first_token_p50_s, found.first_token_p99_s) == (0, None, None)


def test_the_same_seed_plays_the_same_and_another_does_not() -> None:
    assert play(FEW) == play(FEW) != play(replace(FEW, seed=1))


def test_follow_ups_find_their_video_unless_they_are_sent_anywhere() -> None:
    assert play(FEW).moved == 0
    assert play(FEW, Routing.RANDOM).moved > 0.2


def test_a_lost_engine_costs_no_caller_an_answer() -> None:
    often = replace(FEW, engine_lost_every_s=20.0)
    found = play(often)
    assert found.lost_engines > 5
    assert found.handed_over > 0
    assert found.answers > 0.8 * play(FEW).answers
    assert found.engines < FEW.num_engines


def test_callers_wait_for_the_only_engine_to_come_back() -> None:
    one = replace(FEW, num_engines=1, num_callers=2)
    found = play(replace(one, engine_lost_every_s=40.0))
    assert found.lost_engines == 10
    assert found.answers > 0.7 * play(one).answers


def test_engines_count_until_the_end_though_nothing_happens_any_more() -> None:
    assert play(replace(FEW, num_callers=1, pause_s=1e9)).engines == pytest.approx(FEW.num_engines)


def test_engines_are_started_by_load_and_no_more_than_there_are() -> None:
    crowd = replace(FEW, least_engines=1, num_callers=200, pause_s=1.0, max_running=4, warm_up_s=200.0)
    assert play(crowd).engines == pytest.approx(FEW.num_engines)
    assert play(replace(crowd, num_callers=1)).engines == pytest.approx(1.0)


def test_what_was_asked_when_there_was_no_room_is_answered_later() -> None:
    crowd = replace(FEW, num_engines=3, num_callers=60, pause_s=0.5, max_running=2, max_ongoing=2)
    found = play(crowd)
    assert found.answers > 0.5 * play(crowd, Routing.PERFECT).answers


@given(num_engines=st.integers(2, 8), lost=st.integers(0, 7))
def test_when_an_engine_is_lost_only_its_own_sessions_move(num_engines: int, lost: int) -> None:
    lost %= num_engines
    before, after = Ring(range(num_engines)), Ring(set(range(num_engines)) - {lost})
    for session in range(50):
        (owner,) = before.owners(session, 1)
        next_owner = before.owners(session, 2)[-1]
        assert after.owners(session, 1) == [next_owner if owner == lost else owner]


def test_engines_own_about_equal_shares() -> None:
    ring = Ring(range(4))
    owned = [ring.owners(session, 1)[0] for session in range(4000)]
    assert all(0.2 < owned.count(number) / 4000 < 0.3 for number in range(4))


def test_every_situation_is_compared_with_the_perfect_cluster_under_the_same_load(rows: list[Row]) -> None:
    assert scenario_at(0.8, TIMES, OPTIONS).pause_s > scenario_at(0.9, TIMES, OPTIONS).pause_s
    ours = [row for row in rows if row["situation"] == "ring, full at twice"]
    assert [row["load"] for row in ours] == list(dict.fromkeys(row["load"] for row in rows))
    assert all(0.3 < row["goodput"] < 1.3 for row in ours)


def test_the_load_that_is_told_is_the_one_that_was_served_and_about_the_one_asked_for(
    rows: list[Row],
) -> None:
    """The engines' total busy time equals the work of the answers."""
    ours = [row for row in rows if row["situation"] == "ring, full at twice"]
    assert [row["load"] for row in ours] == pytest.approx([0.6, 0.8, 0.9, 1.0], abs=0.06)
    assert max(row["load"] for row in ours) < 1.02
    prompt_s = TIMES.prefill_again_s + (TIMES.prefill_s - TIMES.prefill_again_s) / Scenario().questions
    for row in ours[:2]:  # if no caller gives up, all tokens count
        tokens = row["tokens_per_s"] / row["goodput"] / OPTIONS.num_engines
        busy = tokens / TIMES.rates[4] + tokens / (1 + Scenario().tokens) * prompt_s
        assert row["load"] == pytest.approx(busy, rel=0.05)


def test_more_callers_than_engines_answer_at_once_can_pause() -> None:
    options = ClusterOptions(num_engines=5, num_callers=81)
    assert all(scenario_at(load, TIMES, options).pause_s > 0 for load in (0.6, 1.0))
