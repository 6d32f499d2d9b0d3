"""The speed model against the table in the design, and the plans that follow from it."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vidspec_models.request import SpeculationMode
from vidspec_service.engine.speculation.plan import CostMeter, SpeculationState, StepCosts, best_plan, tokens_per_second


def ideal(ratio: float) -> StepCosts:
    """Costs with free rows and instant messages, as in the published models."""
    return StepCosts(base_s=1.0, row_s=0.0, draft_s=1.0 / ratio, latency_s=0.0)


@pytest.mark.parametrize(
    ("acceptance", "ratio", "serial", "asynchronous"),
    [(0.7, 8, 1.85, 2.01), (0.8, 8, 2.27, 2.63), (0.8, 14, 2.77, 3.01), (0.9, 8, 3.07, 3.90), (0.9, 14, 4.02, 4.79)],
)
def test_the_model_reproduces_the_published_table(
    acceptance: float, ratio: float, serial: float, asynchronous: float
) -> None:
    """Serial figures: PEARL's analysis; asynchronous: our own simulation of the same loop, to 4 %."""
    assert best_plan(acceptance, ideal(ratio), overlap=False, least_gain=1.0).speedup == pytest.approx(serial, rel=0.04)
    parallel = best_plan(acceptance, ideal(ratio), overlap=True, least_gain=1.0)
    assert parallel.speedup == pytest.approx(asynchronous, rel=0.04)


@given(acceptance=st.floats(0, 1), row=st.floats(0, 1), draft=st.floats(0.01, 2))
@example(acceptance=0.943, row=0.0257, draft=0.56)  # rounded to 0.512, where the plan with no wait seems sufficient
def test_overlap_is_never_predicted_to_be_much_slower_than_taking_turns(
    acceptance: float, row: float, draft: float
) -> None:
    costs = StepCosts(base_s=1.0, row_s=row, draft_s=draft)
    serial = best_plan(acceptance, costs, overlap=False, least_gain=1.0)
    parallel = best_plan(acceptance, costs, overlap=True, least_gain=1.0)
    assert parallel.speedup >= serial.speedup - 0.05  # since the search rounds its inputs


def test_a_draft_as_slow_as_the_target_is_not_worth_it() -> None:
    costs = StepCosts(base_s=1.0, row_s=0.05, draft_s=1.0)
    assert best_plan(0.5, costs, overlap=False, least_gain=1.05).is_off


@pytest.mark.parametrize("mode", [SpeculationMode.AUTO, SpeculationMode.SERIAL, SpeculationMode.PARALLEL])
def test_a_forced_mode_speculates_even_at_a_loss(mode: SpeculationMode) -> None:
    speculation = SpeculationState(mode=mode, acceptance=0.1)
    speculation.replan(StepCosts(base_s=1.0, row_s=0.5, draft_s=1.0), take_turns=False)
    assert speculation.plan.is_off is (mode is SpeculationMode.AUTO)


@given(acceptance=st.floats(0, 1), row=st.floats(0, 1), draft=st.floats(0.01, 2), overlap=st.booleans())
def test_every_plan_can_be_carried_out(acceptance: float, row: float, draft: float, overlap: bool) -> None:
    costs = StepCosts(base_s=1.0, row_s=row, draft_s=draft)
    plan = best_plan(acceptance, costs, overlap=overlap, least_gain=0.0)
    assert 0 <= plan.min_draft_tokens <= plan.max_draft_tokens <= plan.max_lead
    made_meanwhile = costs.verification_s(plan.max_draft_tokens + 1) / draft if overlap else 0.0
    assert plan.max_lead >= plan.max_draft_tokens + min(made_meanwhile, 2 * plan.max_draft_tokens)
    assert plan.max_lead <= plan.max_draft_tokens + made_meanwhile + 1


@given(
    acceptance=st.floats(0, 0.99),
    row=st.floats(0, 1),
    draft=st.floats(0.01, 2),
    most=st.integers(1, 32),
    data=st.data(),
    overlap=st.booleans(),
)
def test_the_rate_is_that_of_all_rounds_of_a_cycle_added_up(
    acceptance: float, row: float, draft: float, most: int, data: st.DataObject, overlap: bool
) -> None:
    least = data.draw(st.integers(0, most)) if overlap else most
    costs = StepCosts(base_s=1.0, row_s=row, draft_s=draft)
    tokens, seconds, intact, lead = 0.0, 0.0, 1.0, 0.0
    while intact > 1e-12:
        waited = max(0.0, least - lead) * draft + (costs.latency_s if lead == 0.0 and least else 0.0)
        judged = min(most, max(least, int(lead)))
        verification = costs.verification_s(judged + 1)
        tokens += intact * sum(acceptance**accepted for accepted in range(judged + 1))
        seconds += intact * (waited + verification)
        intact *= acceptance ** (judged + 1)
        lead = max(0.0, verification / draft - 1.0) if overlap else 0.0
    rate = tokens_per_second(acceptance, costs, least, most, overlap=overlap)
    assert rate == pytest.approx(tokens / seconds, rel=1e-6)


def test_where_the_target_is_faster_alone_than_in_single_steps_speculation_is_worth_less() -> None:
    costs = StepCosts(base_s=1.0, row_s=0.05, draft_s=0.1)
    strides = replace(costs, stride_s=0.5)
    slow, fast = (best_plan(0.8, each, overlap=True, least_gain=0.0) for each in (costs, strides))
    assert fast.speedup == pytest.approx(slow.speedup * 0.5 / 1.05)
    assert best_plan(0.8, replace(costs, stride_s=0.2), overlap=True, least_gain=1.05).is_off


def test_a_rejection_counts_for_less_the_more_was_judged() -> None:
    speculation = SpeculationState(mode=SpeculationMode.PARALLEL, acceptance=0.95)
    speculation.observe(0, is_rejected=True)
    assert speculation.acceptance == pytest.approx(0.95 * 32 / 33)
    speculation.observe(500, is_rejected=False)
    before = speculation.acceptance
    speculation.observe(0, is_rejected=True)
    assert 0.98 < speculation.acceptance < before
    for _ in range(128):
        speculation.observe(0, is_rejected=True)
    assert speculation.acceptance < 0.4, "a draft that has become useless is recognised"


def test_a_stride_that_was_slow_once_is_reckoned_to_take_no_longer_than_a_step() -> None:
    costs = CostMeter(base_s=0.3, row_s=0.1)
    costs.observe_stride(3.0)
    assert costs.costs(1, in_strides=True).alone_s == costs.costs(1).alone_s == pytest.approx(0.4)
    costs.stride_s = 0.2
    assert costs.costs(1, in_strides=True).alone_s == 0.2


def test_no_forward_is_reckoned_to_take_longer_than_any_did() -> None:
    costs = CostMeter(base_s=1.0, row_s=0.0)
    costs.observe(1, 1.0)
    assert (costs.base_s, costs.row_s) == (1.0, 0.0), "of one forward nobody can tell what a row takes"
    costs.observe(11, 3.0)
    assert 1.5 < costs.costs(1).verification_s(11) <= 3.0


def test_a_forward_that_lost_its_core_does_not_end_speculation() -> None:
    costs = CostMeter(base_s=0.4, row_s=0.05, draft_s=0.05, stride_s=0.3)
    for num_rows in (1, 9):
        costs.observe(num_rows, 0.4 + 0.05 * num_rows)
    costs.observe(17, 30.0)
    for _ in range(8):
        costs.observe(9, 0.85)
    assert costs.costs(1).verification_s(9) < 1.3


def test_a_target_that_was_slow_for_a_while_is_tried_again_although_only_strides_are_measured_by_then() -> None:
    costs = CostMeter(base_s=0.4, row_s=0.05, draft_s=0.05, stride_s=0.3)
    for _ in range(200):
        costs.observe(1, 3.0)
    assert best_plan(0.95, costs.costs(1, in_strides=True), overlap=True, least_gain=1.05).is_off
    for _ in range(60):
        costs.observe_stride(0.3)
        costs.fade_steps()
    assert not best_plan(0.95, costs.costs(1, in_strides=True), overlap=True, least_gain=1.05).is_off
    for num_rows in (1, 5, 9):
        costs.observe(num_rows, 0.4 + 0.05 * num_rows)
    assert costs.costs(1).verification_s(9) < 1.2, "the slow time is as good as forgotten"


@pytest.mark.parametrize("slow_s", [2.0, 6.0, 30.0])
def test_a_slow_forward_of_many_rows_does_not_end_speculation_for_good(slow_s: float) -> None:
    """Its time counts as that of its rows in an answer's few forwards; afterwards only strides may be measured."""
    costs = CostMeter(base_s=0.4, row_s=0.08, draft_s=0.05, stride_s=0.32)
    costs.observe(2, 0.56)
    costs.observe(14, slow_s)
    for _ in range(20):
        costs.observe_stride(0.32)
        costs.fade_steps()
    assert not best_plan(0.95, costs.costs(1, in_strides=True), overlap=True, least_gain=1.05).is_off


def test_steps_that_are_measured_all_the_time_are_not_doubted() -> None:
    costs = CostMeter(base_s=0.4, row_s=0.05, draft_s=0.05, stride_s=0.1)
    for _ in range(100):
        costs.observe(1, 0.45)
        costs.fade_steps()
    assert costs.base_s == pytest.approx(0.4)
    assert costs.row_s == 0.05


def test_what_a_draft_took_is_believed_less_with_each_answer_that_shows_nothing_of_it() -> None:
    costs = CostMeter(base_s=0.8, row_s=0.1, draft_s=5.0)
    for _ in range(100):
        costs.fade_draft()
    assert costs.draft_s == pytest.approx(CostMeter(base_s=0.8, row_s=0.1).draft_s, rel=0.5)


def test_only_one_that_has_the_target_to_itself_is_reckoned_to_be_decoded_in_strides() -> None:
    meter = CostMeter(base_s=1.0, row_s=0.1, draft_s=0.1, stride_s=0.4)
    assert meter.costs(1, in_strides=True).alone_s == 0.4
    assert meter.costs(1).alone_s == pytest.approx(1.1)
    assert meter.costs(2, in_strides=True).alone_s == pytest.approx(1.2)
    for _ in range(200):
        meter.observe_stride(0.8)
    assert meter.costs(1, in_strides=True).alone_s == pytest.approx(0.8, rel=0.02)
