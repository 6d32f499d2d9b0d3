"""When requests are given to the target, and which is blamed for its death: a simulated engine, random schedules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.requests import request_of
from vidspec_service.engine.frontend.request_table import CLEARED_AFTER, RequestState, RequestTable
from vidspec_service.engine.ipc.messages import Rejected, Tokens
from vidspec_service.engine.speculation.plan import StepCosts, best_plan

PLACES = 3  # requests that the target works on at the same time
FARTHEST = CLEARED_AFTER - 1  # most proposals in one forward


class Handover:
    """A request table whose requests are known by name."""

    def __init__(self, max_running_requests: int) -> None:
        self._table = RequestTable(max_running_requests)
        self._states: dict[str, RequestState] = {}

    def add(self, name: str) -> None:
        self._states[name] = RequestState(request_of(name), payload=())
        self._table.add(self._states[name])

    def remove(self, name: str) -> None:
        self._table.remove(name)

    def due(self) -> str | None:
        state = self._table.next_due()
        return state.request_id if state is not None else None

    def gave(self, name: str) -> None:
        self._table.mark_sent(self._states[name])

    def advanced(self, name: str, num_tokens: int) -> None:
        self._table.route(Tokens(request_id=name, ids=(0,) * num_tokens))

    def died(self) -> str | None:
        """The target has died; refuse the request that is blamed, if any, and return its name."""
        culprit = self._table.target_lost()
        if culprit is not None:
            self._table.route(Rejected(request_id=culprit, message=""))
        return culprit


@dataclass
class Request:
    """`place` is the output position whose computation kills the target (-1: the prefill; None: harmless)."""

    name: str
    length: int
    place: int | None = None
    committed: int = 0
    is_prefilled: bool = False


@dataclass
class Engine:
    """An API process and its target; `dice` decides which rows a forward pass has."""

    dice: Random
    handover: Handover = field(default_factory=lambda: Handover(PLACES))
    alive: dict[str, Request] = field(default_factory=dict)
    at_target: list[Request] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    blames: list[str | None] = field(default_factory=list)  # of each death, in order

    def arrive(self, request: Request) -> None:
        self.alive[request.name] = request
        self.handover.add(request.name)
        self.hand_over()

    def hand_over(self) -> None:
        while (name := self.handover.due()) is not None:
            self.handover.gave(name)
            self.at_target.append(self.alive[name])
        assert [r.name for r in self.at_target] == list(self.alive)[: len(self.at_target)], "not the oldest first"

    def leave(self, name: str) -> None:
        self.at_target = [request for request in self.at_target if request.name != name]
        del self.alive[name]
        self.handover.remove(name)
        self.hand_over()

    def die(self) -> None:
        for request in self.at_target:
            request.is_prefilled = False
        self.at_target = []
        culprit = self.handover.died()
        self.blames.append(culprit)
        if culprit is not None:
            self.refused.append(culprit)
            del self.alive[culprit]
        self.hand_over()

    def work(self, kills: bool = False) -> None:
        """One forward: a prefill, or rows of every decoding request; with `kills` it dies for an outside reason."""
        running = self.at_target[:PLACES]
        unread = [request for request in running if not request.is_prefilled]
        if unread and self.dice.random() < 0.5:
            if kills or unread[0].place == -1:
                self.die()
            else:
                unread[0].is_prefilled = True
            return
        batch = [(request, self.dice.randint(1, 1 + FARTHEST)) for request in running if request.is_prefilled]
        reached = [(r.committed, r.place, r.committed + rows) for r, rows in batch]
        if kills or any(place is not None and first <= place < end for first, place, end in reached):
            self.die()
            return
        for request, rows in batch:
            num_new = min(self.dice.randint(1, rows), request.length - request.committed)
            request.committed += num_new
            self.handover.advanced(request.name, num_new)
            if request.committed == request.length:
                self.ended.append(request.name)
                self.leave(request.name)
        self.hand_over()

    def finish(self) -> None:
        """Work until every request has ended; none may be forgotten."""
        for _ in range(5000):
            if not self.alive:
                return
            assert self.at_target, "requests wait, and nothing is given to the target"
            self.work()
        raise AssertionError(f"no end of {list(self.alive)}")


def crowd(lengths: Iterable[int]) -> list[Request]:
    return [Request(f"innocent {i}", length) for i, length in enumerate(lengths)]


DICE = st.integers(0, 2**32).map(Random)  # hypothesis's own Random would take a second per schedule
LENGTHS = st.lists(st.integers(1, 120), min_size=0, max_size=6)


@given(dice=DICE, lengths=LENGTHS, place=st.integers(-1, 99), after=st.integers(0, 6))
def test_what_kills_every_target_is_refused_after_two_and_nothing_else_is(
    dice: Random, lengths: list[int], place: int, after: int
) -> None:
    engine = Engine(dice)
    arrivals = crowd(lengths)
    arrivals.insert(after, Request("poison", 100, place))
    for request in arrivals:
        engine.arrive(request)
        for _ in range(dice.randint(0, 8)):
            engine.work()
    engine.finish()
    assert engine.refused == ["poison"]
    assert engine.blames == [None, "poison"]
    assert sorted(engine.ended) == sorted(request.name for request in arrivals if request.place is None)


@given(dice=DICE, lengths=LENGTHS.filter(bool), before=st.integers(0, 30))
def test_a_death_that_was_nobodys_costs_nobody_an_answer(dice: Random, lengths: list[int], before: int) -> None:
    engine = Engine(dice)
    for request in crowd(lengths):
        engine.arrive(request)
    for _ in range(before):
        engine.work()
    engine.work(kills=True)
    engine.finish()
    assert (engine.refused, len(engine.ended)) == ([], len(lengths))


@given(dice=DICE, lengths=LENGTHS, after=st.integers(0, 6))
def test_what_kills_at_random_is_found_before_the_worker_is_given_up(
    dice: Random, lengths: list[int], after: int
) -> None:
    engine = Engine(dice)
    arrivals = crowd(lengths)
    killer = Request("killer", 2000)
    arrivals.insert(after, killer)
    for request in arrivals:
        engine.arrive(request)
    for _ in range(3000):
        if "killer" not in engine.alive:
            break
        engine.work(kills=killer.is_prefilled and killer in engine.at_target and dice.randint(0, 9) == 0)
    engine.finish()
    unexplained = "".join("x" if blame is None else " " for blame in engine.blames).split()
    assert max(map(len, unexplained), default=0) <= 3
    assert len(engine.blames) <= 4
    assert len([name for name in engine.refused if name != "killer"]) <= 2


@given(dice=DICE, lengths=LENGTHS.filter(bool))
def test_whoever_leaves_holds_nobody_up(dice: Random, lengths: list[int]) -> None:
    engine = Engine(dice)
    for request in crowd(lengths):
        engine.arrive(request)
    engine.die()
    while engine.alive:
        name = dice.choice(sorted(engine.alive))
        engine.leave(name)
        assert engine.at_target or not engine.alive


def test_after_a_death_the_next_is_given_when_the_one_before_is_past_suspicion() -> None:
    handover = Handover(PLACES)
    for name in ("a", "b"):
        handover.add(name)
        assert handover.due() == name
        handover.gave(name)
    assert handover.died() is None
    assert handover.due() == "a"
    handover.gave("a")
    handover.add("new")
    handover.advanced("a", CLEARED_AFTER - 1)
    assert handover.due() is None
    handover.advanced("a", 1)
    assert handover.due() == "b"
    handover.gave("b")
    assert handover.due() is None, "what is new was given while another was on trial"
    handover.remove("b")
    assert handover.due() == "new"


def test_who_was_there_at_three_deaths_is_alone_to_its_end() -> None:
    handover = Handover(PLACES)
    for name in ("a", "b"):
        handover.add(name)
    for _ in range(3):
        for name in ("a", "b"):
            assert handover.due() == name
            handover.gave(name)
            handover.advanced(name, CLEARED_AFTER)
        assert handover.died() is None
    assert handover.due() == "a"
    handover.gave("a")
    handover.advanced("a", 2 * CLEARED_AFTER)
    assert handover.due() is None
    handover.remove("a")
    assert handover.due() == "b"


def test_who_waits_for_a_place_is_not_on_trial() -> None:
    handover = Handover(1)
    for name in ("a", "b"):
        handover.add(name)
        handover.gave(name)
    handover.died()
    handover.gave("a")
    handover.advanced("a", CLEARED_AFTER)
    assert handover.due() is None
    assert handover.died() is None, "b was blamed for what it had no part in"


def test_no_plan_reaches_past_suspicion() -> None:
    costs = StepCosts(base_s=1.0, row_s=1e-6, draft_s=1e-6)
    eager = best_plan(0.99, costs, overlap=True, least_gain=1.05)
    assert eager.max_draft_tokens < CLEARED_AFTER
