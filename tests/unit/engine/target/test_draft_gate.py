"""Which requests the draft is asked to follow."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.unit.engine.far_ends import prompt_of
from tests.unit.engine.requests import request_of, target_request
from vidspec_models.core_share import CoreShare, torch_threads
from vidspec_models.request import SpeculationMode
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Follow
from vidspec_service.engine.ipc.payload import TowerMemory
from vidspec_service.engine.speculation.plan import StepCosts
from vidspec_service.engine.target.draft_gate import AnswerLengths, DraftGate
from vidspec_service.engine.target.draft_link import DraftLink
from vidspec_service.engine.target.request import TargetRequest

pytestmark = pytest.mark.unit

COSTS = StepCosts(base_s=0.0036, row_s=0.0003, draft_s=0.0004)
PREPARE_S = 0.1


@dataclass
class Draft:
    """A link, and the far end of its channel."""

    link: DraftLink
    far: Channel

    def asked(self) -> list[str]:
        found = []
        while (received := self.far.receive()) is not None:
            if isinstance(received[0], Follow):
                found.append(received[0].request_id)
        return found


@pytest.fixture
def draft() -> Iterator[Draft]:
    near, far = Channel.pair()
    link = DraftLink()
    link.connect(near)
    yield Draft(link, far)
    link.disconnect()
    far.close()


def running(
    mode: SpeculationMode, *, acceptance: float = 0.9, num_committed: int = 1, limit: int = 4000, name: str = "r"
) -> TargetRequest:
    return target_request(
        prompt_of(name),
        name=name,
        mode=mode,
        acceptance=acceptance,
        max_tokens=limit,
        committed=[7] * num_committed,
        prepare_s=PREPARE_S,
    )


@pytest.mark.parametrize(
    ("mode", "shares_cores", "num_sharing", "asks"),
    [
        pytest.param(SpeculationMode.SERIAL, True, 50, True, id="forced, in any crowd"),
        pytest.param(SpeculationMode.PARALLEL, True, 50, True, id="forced, in any crowd"),
        pytest.param(SpeculationMode.OFF, True, 1, False, id="never with off"),
        pytest.param(SpeculationMode.AUTO, True, 1, True, id="auto, alone"),
        pytest.param(SpeculationMode.AUTO, True, 2, False, id="auto, where the draft's work is taken from others"),
        pytest.param(SpeculationMode.AUTO, False, 9, True, id="auto, where it is not"),
    ],
)
def test_who_is_asked_for_before_anything_is_known_of_the_answer(
    draft: Draft, mode: SpeculationMode, shares_cores: bool, num_sharing: int, asks: bool
) -> None:
    gate = DraftGate(draft.link, CoreShare() if shares_cores else None)
    assert gate.should_ask_early(request_of("r", mode), num_sharing) is asks


@pytest.mark.parametrize("mode", [SpeculationMode.AUTO, SpeculationMode.PARALLEL])
def test_on_a_shared_gpu_a_draft_is_asked_when_the_answer_begins(draft: Draft, mode: SpeculationMode) -> None:
    gate, request = DraftGate(draft.link, None), running(mode)
    draft.link.shares_gpu = True
    assert not gate.should_ask_early(request.asked, num_sharing=1)
    assert gate.replan(request, COSTS, num_sharing=1)
    assert request.speculation.expected_until > time.monotonic()
    assert (request.speculation.plan.max_lead > request.speculation.plan.max_draft_tokens) is (
        mode is SpeculationMode.PARALLEL
    ), "auto takes turns"


def test_on_a_shared_gpu_a_draft_that_reads_a_long_video_after_short_ones_is_awaited(draft: Draft) -> None:
    gate, request = DraftGate(draft.link, None), running(SpeculationMode.AUTO)
    draft.link.shares_gpu = True
    for work_s in (2.0, 0.01, 0.01):
        gate.observe(work_s)
    for _ in range(60):
        gate.end(running(SpeculationMode.AUTO, num_committed=60))  # short of a draft: the figure of its work fades
    assert gate.replan(request, COSTS, num_sharing=1)
    assert request.speculation.expected_until > time.monotonic() + 5.0


def test_on_a_shared_gpu_a_crowd_does_not_stand_still_for_a_draft(draft: Draft) -> None:
    gate, crowded, long = DraftGate(draft.link, None), running(SpeculationMode.AUTO), running(SpeculationMode.PARALLEL)
    draft.link.shares_gpu = True
    assert not gate.may_ask(crowded.asked, num_sharing=8)
    assert not gate.replan(crowded, COSTS, num_sharing=8)
    assert gate.replan(long, COSTS, num_sharing=8)
    assert not long.speculation.expected_until


def test_on_a_shared_gpu_only_a_draft_that_is_late_twice_in_a_row_costs_what_it_was_waited_for(draft: Draft) -> None:
    gate = DraftGate(draft.link, None)
    draft.link.shares_gpu = True

    def asks() -> bool:
        gate.forget()
        return gate.replan(running(SpeculationMode.AUTO, limit=40), COSTS, num_sharing=1)

    for _ in range(2):
        gate.observe(0.001)
        gate.observe_timeout()
        assert asks()
    gate.observe_timeout()
    assert not asks()


def test_in_a_crowd_a_long_answer_is_worth_a_draft_and_a_short_one_is_not(draft: Draft) -> None:
    gate = DraftGate(draft.link, CoreShare())
    long = running(SpeculationMode.AUTO, num_committed=2000)
    assert not gate.replan(running(SpeculationMode.AUTO), COSTS, num_sharing=8)
    assert not gate.replan(running(SpeculationMode.AUTO, num_committed=2000, limit=2010), COSTS, num_sharing=8)
    middling = running(SpeculationMode.AUTO, num_committed=370)  # its remaining time is longer than the draft's work
    assert not gate.replan(middling, COSTS, num_sharing=8), "a draft does not save all of it"
    assert gate.replan(long, COSTS, num_sharing=8)
    assert gate.replan(long, COSTS, num_sharing=8)
    assert draft.asked() == ["r"], "asked once"


def after_answers(draft: Draft, *lengths: int, work_s: float, cores: CoreShare | None = None) -> DraftGate:
    """A gate that has seen answers of these lengths, and a draft that prepared itself for `work_s` each time."""
    gate = DraftGate(draft.link, cores or CoreShare())
    for length in lengths:
        earlier = running(SpeculationMode.PARALLEL, num_committed=length)
        assert gate.replan(earlier, COSTS, num_sharing=1)
        gate.observe(work_s)
        gate.end(earlier)
    assert draft.asked() == ["r"] * len(lengths)
    return gate


def test_alone_too_a_draft_is_asked_at_once_only_if_answers_of_late_were_worth_its_work(draft: Draft) -> None:
    gate = after_answers(draft, *[60] * 40, work_s=0.02)
    assert gate.should_ask_early(request_of("r", SpeculationMode.AUTO), num_sharing=1)
    short = request_of("r", SpeculationMode.AUTO, max_tokens=3)
    assert not gate.should_ask_early(short, num_sharing=1), "the answer may have three tokens"
    gate = after_answers(draft, *[3] * 40, work_s=0.001)
    assert gate.should_ask_early(request_of("r", SpeculationMode.AUTO), num_sharing=1), "it hardly costs anything"
    for _ in range(80):
        gate.observe(0.02)
    assert not gate.should_ask_early(request_of("r", SpeculationMode.AUTO), num_sharing=1)
    assert gate.should_ask_early(request_of("r", SpeculationMode.PARALLEL), num_sharing=1)


def test_an_answer_of_one_token_has_no_use_for_a_draft(draft: Draft) -> None:
    gate = DraftGate(draft.link, CoreShare())
    assert not gate.should_ask_early(request_of("r", SpeculationMode.AUTO, max_tokens=1), num_sharing=1)
    assert gate.should_ask_early(request_of("r", SpeculationMode.AUTO, max_tokens=2), num_sharing=1)


def test_an_answer_that_turns_out_to_be_long_gets_its_draft_then_with_what_the_tower_made(draft: Draft) -> None:
    gate = after_answers(draft, *[3] * 40, work_s=0.02)
    request = running(SpeculationMode.AUTO)
    request.tower = tower = TowerMemory.of(())
    assert not gate.replan(request, COSTS, num_sharing=1)
    request.committed += [7] * 100
    assert gate.replan(request, COSTS, num_sharing=1)
    received = draft.far.receive()
    assert received is not None
    asked, fds = received
    assert (asked, len(fds)) == (Follow(request_id="r"), 1)
    os.close(fds[0])
    assert request.tower is None, "nobody needs it any more"
    assert tower.read() == []


def test_the_rest_of_an_answer_is_expected_to_be_that_of_earlier_ones_as_long(draft: Draft) -> None:
    """Of short answers and long ones, one that has four tokens is a long one."""
    gate = after_answers(draft, *[3, 60] * 16, work_s=0.1)
    request = running(SpeculationMode.AUTO)
    assert not gate.replan(request, COSTS, num_sharing=1)
    request.committed += [7] * 3
    assert gate.replan(request, COSTS, num_sharing=1)


def test_the_length_of_an_answer_is_expected_to_be_that_of_answers_to_the_same_question(draft: Draft) -> None:
    gate = after_answers(draft, 60, work_s=0.05)
    for _ in range(3):
        gate.end(running(SpeculationMode.AUTO, num_committed=60, name="describe"))
        gate.end(running(SpeculationMode.AUTO, num_committed=3, name="which colour"))
    assert gate.should_ask_early(request_of("describe", SpeculationMode.AUTO), 1)
    assert not gate.should_ask_early(request_of("which colour", SpeculationMode.AUTO), 1)
    begun = running(SpeculationMode.AUTO, name="which colour", num_committed=2)
    assert not gate.replan(begun, COSTS, num_sharing=1)
    begun.committed += [7] * 80
    assert gate.replan(begun, COSTS, num_sharing=1), "this one is long, whatever the others were"


def test_a_new_question_is_expected_to_be_like_others_however_often_one_of_them_was_asked(
    draft: Draft,
) -> None:
    gate = after_answers(draft, *[60] * 40, work_s=0.05)
    new = request_of("new", SpeculationMode.AUTO)
    assert gate.should_ask_early(new, 1)
    for number in range(31):
        gate.end(running(SpeculationMode.AUTO, num_committed=3, name=f"short {number}"))
    assert not gate.should_ask_early(new, 1)
    assert gate.should_ask_early(request_of("r", SpeculationMode.AUTO), 1)


def test_questions_that_were_not_asked_for_long_are_forgotten() -> None:
    lengths, old, usual = AnswerLengths(), request_of("old"), request_of("usual")
    lengths.add(usual, 300)
    lengths.add(old, 500)
    for number in range(1000):
        lengths.add(request_of(f"q{number}"), 10)
    assert lengths.expected_rest(old, 1, math.inf) == 499
    lengths.add(usual, 300)
    for number in range(1000, 2000):
        lengths.add(request_of(f"q{number}"), 10)
    assert (lengths.expected_rest(old, 1, math.inf), lengths.expected_rest(usual, 1, math.inf)) == (9, 299)


def test_while_the_draft_prepares_itself_it_has_one_of_the_cores_that_both_share(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    cores, seen = CoreShare(), list[int]()
    gate = after_answers(draft, *[60] * 8, work_s=0.02, cores=cores)
    gate.observe(5.0)  # for a long video
    with torch_threads(4):
        assert cores.num_threads == 4
        gate.ask("r")
        for clock[0] in (100.0, 100.019, 100.021):
            seen.append(cores.num_threads)
    assert seen == [3, 3, 4]


def test_no_core_is_lent_for_as_long_as_the_first_request_after_a_start_takes(draft: Draft) -> None:
    cores = CoreShare()
    gate = after_answers(draft, *[60] * 3, work_s=5.0, cores=cores)
    with torch_threads(4):
        gate.ask("r")
        assert cores.num_threads == 4


def test_a_slow_start_of_the_draft_is_no_measure_of_its_work(draft: Draft) -> None:
    gate = after_answers(draft, *[60] * 3, work_s=5.0)
    gate.observe(0.01)
    assert gate.should_ask_early(request_of("r", SpeculationMode.AUTO), num_sharing=1)


def test_a_draft_that_was_slow_for_a_while_is_asked_again_although_nobody_measures_it_by_then(draft: Draft) -> None:
    gate = after_answers(draft, *[60] * 40, work_s=5.0)
    assert not gate.should_ask_early(request_of("r", SpeculationMode.AUTO), num_sharing=1)
    for _ in range(100):
        gate.end(running(SpeculationMode.AUTO, num_committed=60))
    assert gate.should_ask_early(request_of("r", SpeculationMode.AUTO), num_sharing=1)


def test_where_answers_have_been_long_of_late_the_next_is_expected_to_be(draft: Draft) -> None:
    gate = DraftGate(draft.link, CoreShare())
    for _ in range(20):
        gate.end(running(SpeculationMode.AUTO, num_committed=2000))
    assert gate.replan(running(SpeculationMode.AUTO), COSTS, num_sharing=8)


def test_a_draft_that_is_never_right_is_not_asked_and_one_that_nobody_asks_is_not_planned_for(draft: Draft) -> None:
    gate = DraftGate(draft.link, CoreShare())
    wrong = running(SpeculationMode.AUTO, acceptance=0.0)
    assert not gate.replan(wrong, COSTS, num_sharing=1)
    short = running(SpeculationMode.AUTO)
    assert not gate.replan(short, COSTS, num_sharing=8)
    assert (wrong.speculation.plan.is_off, short.speculation.plan.is_off) == (True, True)
    assert draft.asked() == []


def test_another_draft_is_asked_again_and_an_ended_request_is_forgotten(draft: Draft) -> None:
    gate = DraftGate(draft.link, CoreShare())
    request = running(SpeculationMode.PARALLEL)
    assert gate.replan(request, COSTS, num_sharing=1)
    gate.forget()
    assert gate.replan(request, COSTS, num_sharing=1)
    gate.end(request)
    assert gate.replan(request, COSTS, num_sharing=1)
    assert draft.asked() == ["r"] * 3


def test_without_a_draft_nobody_is_followed() -> None:
    gate = DraftGate(DraftLink(), CoreShare())
    assert not gate.should_ask_early(request_of("r", SpeculationMode.PARALLEL), num_sharing=1)
