"""The prediction uses the policy's speed model with probed forward times, relative to the baseline's prediction."""

from __future__ import annotations

import pytest

from tests.unit.bench.speed.worlds import costs
from vidspec_service.bench.speed.costs import ProbedCosts, predict, step_costs
from vidspec_service.bench.speed.options import Mode
from vidspec_service.engine.speculation.plan import Plan, best_plan


def test_the_fitted_line_gives_back_its_forwards() -> None:
    probed = costs(target_s=0.010, row_s=0.0005)
    step = step_costs(probed.target, draft_s=0.001, latency_s=0.0001)
    assert step.base_s == pytest.approx(0.0095)
    assert step.row_s == pytest.approx(0.0005)
    assert step.verification_s(9) == pytest.approx(probed.target.seconds[9])


def test_the_cost_ratio_is_of_single_rows() -> None:
    assert costs(target_s=0.012, draft_s=0.001).cost_ratio == pytest.approx(12)


def predicted(
    mode: Mode, acceptance: float = 0.9, probed: ProbedCosts | None = None, latency_s: float = 0.0
) -> tuple[Plan, float]:
    found = predict(mode, acceptance, probed or costs(), latency_s)
    assert found is not None
    return found


def test_a_prediction_over_an_equal_baseline_is_the_plans_own() -> None:
    plan = best_plan(0.9, step_costs(costs().target, 0.001, 0.0001), overlap=True, least_gain=0.0)
    found, speedup = predicted(Mode.PARALLEL, latency_s=0.0001)
    assert found == plan
    assert speedup == pytest.approx(plan.speedup)


def test_a_baseline_with_more_cores_lowers_the_prediction_in_proportion() -> None:
    faster = predicted(Mode.PARALLEL, probed=costs(alone_s=0.008))
    assert faster[1] == pytest.approx(0.8 * predicted(Mode.PARALLEL)[1])


def test_in_serial_the_target_is_reckoned_by_itself_and_else_beside_a_draft_at_work() -> None:
    probed = costs(alone_s=0.008)
    for mode, target, overlap in ((Mode.SERIAL, probed.alone, False), (Mode.PARALLEL, probed.target, True)):
        plan = best_plan(0.9, step_costs(target, 0.001, 0.0), overlap=overlap, least_gain=0.0)
        assert predicted(mode, probed=probed)[0] == plan


def test_parallel_beats_serial_and_auto_gives_up_where_nothing_is_accepted() -> None:
    assert predicted(Mode.PARALLEL, latency_s=0.0001)[1] > predicted(Mode.SERIAL, latency_s=0.0001)[1] > 1
    plan, speedup = predicted(Mode.AUTO, acceptance=0.0, latency_s=0.0001)
    assert plan.is_off
    assert speedup == pytest.approx(1.0)


def test_full_acceptance_is_not_a_division_by_zero_and_off_has_no_prediction() -> None:
    assert predicted(Mode.PARALLEL, acceptance=1.0, latency_s=0.0001)[1] > 1
    assert predict(Mode.OFF, 0.9, costs(), 0.0001) is predict(Mode.HF, 0.9, costs(), 0.0001) is None
