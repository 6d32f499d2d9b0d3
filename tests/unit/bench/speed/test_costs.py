"""Predictions use the policy's speed model, with probed forwards or the steps of a run, relative to the baseline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.bench.speed.factories import costs
from vidspec_service.bench.speed.costs import ProbedCosts, costs_alone, costs_in_run, fitted_costs, predict
from vidspec_service.bench.speed.options import Mode
from vidspec_service.engine.speculation.plan import Plan, best_plan


def test_the_fitted_line_gives_back_its_forwards() -> None:
    probed = costs(target_s=0.010, row_s=0.0005)
    step = fitted_costs(probed.target.seconds.items(), draft_s=0.001, latency_s=0.0001)
    assert step.base_s == pytest.approx(0.0095)
    assert step.row_s == pytest.approx(0.0005)
    assert step.verification_s(9) == pytest.approx(probed.target.seconds[9])


def test_the_cost_ratio_is_of_single_rows() -> None:
    assert costs(target_s=0.012, draft_s=0.001).cost_ratio == pytest.approx(12)


def predicted(
    mode: Mode, acceptance: float = 0.9, probed: ProbedCosts | None = None, latency_s: float = 0.0001
) -> Plan:
    found = predict(mode, acceptance, costs_alone(mode, probed or costs(), latency_s))
    assert found is not None
    return found


def test_a_baseline_with_more_cores_lowers_the_prediction_in_proportion() -> None:
    faster = predicted(Mode.PARALLEL, probed=costs(alone_s=0.008))
    assert faster.speedup == pytest.approx(0.8 * predicted(Mode.PARALLEL).speedup)


def test_in_serial_the_target_is_reckoned_by_itself_and_else_beside_a_draft_at_work() -> None:
    probed = costs(alone_s=0.008)
    for mode, target, overlap in ((Mode.SERIAL, probed.alone, False), (Mode.PARALLEL, probed.target, True)):
        step = replace(fitted_costs(target.seconds.items(), 0.001, 0.0001), stride_s=0.008)
        assert predicted(mode, probed=probed) == best_plan(0.9, step, overlap=overlap, least_gain=0.0)


def test_parallel_beats_serial_and_auto_gives_up_where_nothing_is_accepted() -> None:
    assert predicted(Mode.PARALLEL).speedup > predicted(Mode.SERIAL).speedup > 1
    plan = predicted(Mode.AUTO, acceptance=0.0)
    assert plan.is_off
    assert plan.speedup == 1.0


def test_full_acceptance_is_not_a_division_by_zero_and_off_has_no_prediction() -> None:
    assert predicted(Mode.PARALLEL, acceptance=1.0).speedup > 1
    for mode in (Mode.OFF, Mode.HF):
        assert predict(mode, 0.9, costs_alone(mode, costs(), 0.0001)) is None


def test_the_costs_of_a_run_are_those_of_its_steps() -> None:
    target = [(1.0, 1.015, 1), (2.0, 2.023, 9), (3.0, 3.015, 1)]
    draft = [(1.0, 1.008, 8), (1.5, 1.508, 8), (2.0, 2.016, 16)]
    step = costs_in_run(target, draft, 0.0001, alone_s=0.012)
    assert step is not None
    assert step.base_s == pytest.approx(0.014)
    assert step.row_s == pytest.approx(0.001)
    assert step.draft_s == pytest.approx(0.001)
    assert (step.latency_s, step.alone_s) == (0.0001, 0.012)


def test_steps_of_one_size_and_a_draft_that_did_nothing_tell_no_costs() -> None:
    draft = [(1.0, 1.008, 8)]
    assert costs_in_run([(1.0, 1.015, 9), (2.0, 2.015, 9)], draft, 0.0001, alone_s=0.012) is None
    assert costs_in_run([(1.0, 1.015, 1), (2.0, 2.023, 9)], [], 0.0001, alone_s=0.012) is None
