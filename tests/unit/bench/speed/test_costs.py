"""The prediction is the policy's own speed model, fed with probed forwards and put against the baseline's."""

from __future__ import annotations

import pytest

from tests.unit.bench.speed.worlds import costs
from vidspec_service.bench.speed.costs import predict, step_costs
from vidspec_service.bench.speed.options import Mode
from vidspec_service.engine.speculation.plan import best_plan


def test_the_fitted_line_gives_back_its_forwards() -> None:
    probed = costs(target_s=0.010, row_s=0.0005)
    step = step_costs(probed.target, draft_s=0.001, latency_s=0.0001)
    assert step.base_s == pytest.approx(0.0095)
    assert step.row_s == pytest.approx(0.0005)
    assert step.verification_s(9) == pytest.approx(probed.target.seconds[9])


def test_the_cost_ratio_is_of_single_rows() -> None:
    assert costs(target_s=0.012, draft_s=0.001).cost_ratio == pytest.approx(12)


def test_a_prediction_over_an_equal_baseline_is_the_plans_own() -> None:
    probed = costs()
    found = predict(Mode.PARALLEL, 0.9, probed, 0.0001)
    plan = best_plan(0.9, step_costs(probed.target, 0.001, 0.0001), overlap=True, least_gain=0.0)
    assert found is not None
    assert found[0] == plan
    assert found[1] == pytest.approx(plan.speedup)


def test_a_baseline_with_more_cores_lowers_the_prediction_in_proportion() -> None:
    equal, faster = predict(Mode.PARALLEL, 0.9, costs(), 0.0), predict(Mode.PARALLEL, 0.9, costs(alone_s=0.008), 0.0)
    assert equal is not None
    assert faster is not None
    assert faster[1] == pytest.approx(0.8 * equal[1])


def test_in_serial_the_target_is_reckoned_by_itself_and_else_beside_a_draft_at_work() -> None:
    probed = costs(alone_s=0.008)
    serial, parallel = (predict(mode, 0.9, probed, 0.0) for mode in (Mode.SERIAL, Mode.PARALLEL))
    for found, target, overlap in ((serial, probed.alone, False), (parallel, probed.target, True)):
        assert found is not None
        assert found[0] == best_plan(0.9, step_costs(target, 0.001, 0.0), overlap=overlap, least_gain=0.0)


def test_parallel_beats_serial_and_auto_gives_up_where_nothing_is_accepted() -> None:
    probed = costs()
    parallel, serial = predict(Mode.PARALLEL, 0.9, probed, 0.0001), predict(Mode.SERIAL, 0.9, probed, 0.0001)
    nothing = predict(Mode.AUTO, 0.0, probed, 0.0001)
    assert parallel is not None
    assert serial is not None
    assert nothing is not None
    assert parallel[1] > serial[1] > 1
    assert nothing[0].is_off
    assert nothing[1] == pytest.approx(1.0)


def test_full_acceptance_is_not_a_division_by_zero_and_off_has_no_prediction() -> None:
    found = predict(Mode.PARALLEL, 1.0, costs(), 0.0001)
    assert found is not None
    assert found[1] > 1
    assert predict(Mode.OFF, 0.9, costs(), 0.0001) is None
    assert predict(Mode.HF, 0.9, costs(), 0.0001) is None
