"""Event simulation of a cluster of engines and its callers. Pure: times come from measurements, randomness from a seed.

An engine shares its time equally among the k requests that it runs: a prefill advances at 1/k of its speed, and an
answer at 1/k of the measured rate (tokens/s of all answers together). Requests are routed as by Ray's
ConsistentHashRouter: to the owner of their session on the ring, or one of the next two if it is full; else they wait.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

import numpy as np

_POINTS = 1000  # points of an engine on the ring, as `cluster.application` configures Ray
_FALLBACKS = 2  # engines that are tried after the owner, also as configured there
_DONE = 1e-9
_NOBODY = -1  # in place of an engine's number, while there is no engine


class Routing(StrEnum):
    """Which engine a request goes to."""

    RING = "ring"  # the owner of its session, or one of the next two
    RANDOM = "random"  # any engine with room
    PERFECT = "perfect"  # the least loaded engine, as if all engines had seen every video: an unreachable upper bound


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Measured times of one engine, in seconds."""

    prefill_s: float  # of a video that the engine has not seen
    prefill_again_s: float  # of a video that it has seen
    rates: Mapping[int, float]  # number of answers at once -> tokens/s of all of them together
    start_s: float  # until a new engine is ready

    def rate(self, num_running: int) -> float:
        """Tokens/s of `num_running` answers: interpolated linearly; above the largest measured number, its rate."""
        known = sorted(self.rates)
        return float(np.interp(num_running, known, [self.rates[number] for number in known]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The conditions of a simulated cluster."""

    num_engines: int = 100
    least_engines: int | None = None  # None: always `num_engines`; else the minimum when scaling with the load
    num_callers: int = 5000
    questions: int = 4  # about each video, one after the other
    pause_s: float = 10.0  # mean, between an answer and the next question
    tokens: float = 80.0  # mean length of an answer
    max_running: int = 16  # requests that an engine works on at the same time
    max_ongoing: int = 16  # requests that an engine accepts, running or queued; when full, the next engine is tried
    engine_lost_every_s: float | None = None  # in the whole cluster
    patience_s: float = 10.0  # an answer that begins later does not count
    warm_up_s: float = 120.0  # not counted
    seconds: float = 600.0
    look_s: float = 10.0  # between two decisions on the number of engines
    busy: float = 0.75  # share of `max_running`: with more requests per engine on average, another engine is started
    seed: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    session: int
    question: int  # of the session, from 1 on
    asked_at: float
    tokens: float
    prefill: float = 0.0  # seconds of prefill that are left
    begun: bool = False
    in_time: bool = True
    done: float = 0.0  # of its tokens
    is_placed: bool = False


@dataclass(slots=True, eq=False)
class _Engine:
    number: int
    running: list[_Request] = field(default_factory=list)
    queue: deque[_Request] = field(default_factory=deque)
    videos: set[int] = field(default_factory=set)
    at: float = 0.0  # the time up to which its requests have advanced
    version: int = 0  # of its next event; events of other versions are ignored

    @property
    def num_ongoing(self) -> int:
        return len(self.running) + len(self.queue)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Results of a simulation, without the warm-up."""

    tokens_in_time: float  # of answers that began within the callers' patience
    answers: int
    moved: float  # share of follow-up questions that met an engine without their video
    first_token_p50_s: float | None  # None if there was no first token
    first_token_p99_s: float | None
    engines: float  # mean number
    lost_engines: int
    handed_over: int  # answers that another engine had to continue


class Ring:
    """Consistent hashing: engines have many points on a circle; a session's owner is the first after its own point."""

    def __init__(self, engines: Iterable[int]) -> None:
        self._points = sorted((_hash(f"{number}:{point}"), number) for number in engines for point in range(_POINTS))

    def owners(self, session: int, most: int) -> list[int]:
        """The owner and the engines that follow it on the circle, at most `most` in all."""
        found: dict[int, None] = {}
        start = bisect.bisect_right(self._points, (_hash(f"session {session}"), -1))
        for place in itertools.chain(range(start, len(self._points)), range(start)):
            found[self._points[place][1]] = None
            if len(found) == most:
                break
        return list(found)


class Simulation:
    """One simulation; `run` returns its result."""

    def __init__(self, times: EngineTimes, scenario: Scenario, routing: Routing) -> None:
        self._times, self._scenario, self._routing = times, scenario, routing
        self._rates = [times.rate(number) for number in range(scenario.max_running + 1)]
        self._rng = random.Random(scenario.seed)
        self._engines: dict[int, _Engine] = {}
        self._ring = Ring(())
        self._num_starting = 0
        self._waiting: dict[int, deque[_Request]] = {}  # engine -> requests that it could take if it had room
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._sessions, self._numbers = itertools.count(), itertools.count(), itertools.count()
        self._now = 0.0
        self._firsts: list[float] = []
        self._tokens = 0.0
        self._answers = self._follow_ups = self._moved = self._num_lost = self._num_handed = 0
        self._engine_seconds = 0.0

    def run(self) -> SimulationResult:
        """Simulate until the end of the scenario."""
        scenario = self._scenario
        self._start_engines(scenario.least_engines or scenario.num_engines)
        for _ in range(scenario.num_callers):
            self._later(self._rng.expovariate(1 / scenario.pause_s), self._new_session)
        if scenario.engine_lost_every_s is not None:
            self._later(scenario.engine_lost_every_s, self._lose_engine)
        if scenario.least_engines is not None:
            self._later(scenario.look_s, self._scale)
        end = scenario.warm_up_s + scenario.seconds
        while self._events and self._events[0][0] <= end:
            time, _, action = heapq.heappop(self._events)
            self._wait_until(time)
            action()
        self._wait_until(end)
        firsts = sorted(self._firsts)
        return SimulationResult(
            tokens_in_time=self._tokens,
            answers=self._answers,
            moved=self._moved / max(1, self._follow_ups),
            first_token_p50_s=firsts[len(firsts) // 2] if firsts else None,
            first_token_p99_s=firsts[math.ceil(len(firsts) * 0.99) - 1] if firsts else None,
            engines=self._engine_seconds / scenario.seconds,
            lost_engines=self._num_lost,
            handed_over=self._num_handed,
        )

    def _wait_until(self, time: float) -> None:
        counted_s = time - max(self._now, self._scenario.warm_up_s)
        self._engine_seconds += len(self._engines) * max(counted_s, 0.0)
        self._now = time

    @property
    def _counts(self) -> bool:
        return self._now >= self._scenario.warm_up_s

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), action))

    # Callers

    def _new_session(self) -> None:
        self._ask(next(self._sessions), 1)

    def _ask(self, session: int, question: int) -> None:
        tokens = 1 + self._rng.expovariate(1 / self._scenario.tokens)
        self._place(_Request(session, question, self._now, tokens))

    def _answered(self, request: _Request) -> None:
        if self._counts:
            self._answers += 1
            self._tokens += request.tokens if request.in_time else 0.0
        is_last = request.question == self._scenario.questions
        go_on = self._new_session if is_last else lambda: self._ask(request.session, request.question + 1)
        self._later(self._rng.expovariate(1 / self._scenario.pause_s), go_on)

    # Routing

    def _place(self, request: _Request) -> None:
        candidates = self._candidates(request)
        engine = self._with_room(candidates)
        request.is_placed = engine is not None
        if engine is None:
            for number in [each.number for each in candidates] or [_NOBODY]:
                self._waiting.setdefault(number, deque()).append(request)
            return
        is_new = request.session not in engine.videos and self._routing is not Routing.PERFECT
        is_first = request.question == 1
        engine.videos.add(request.session)
        request.prefill = self._times.prefill_s if is_new or is_first else self._times.prefill_again_s
        if self._counts and not is_first:
            self._follow_ups += 1
            self._moved += is_new
        engine.queue.append(request)
        self._run_queue(engine)

    def _with_room(self, candidates: list[_Engine]) -> _Engine | None:
        has_room = [each for each in candidates if each.num_ongoing < self._scenario.max_ongoing]
        if not has_room:
            return None
        if self._routing is Routing.PERFECT:
            return min(has_room, key=lambda each: each.num_ongoing)
        return self._rng.choice(has_room) if self._routing is Routing.RANDOM else has_room[0]

    def _candidates(self, request: _Request) -> list[_Engine]:
        if self._routing is Routing.RING:
            return [self._engines[number] for number in self._ring.owners(request.session, 1 + _FALLBACKS)]
        return list(self._engines.values())

    def _place_waiting(self, engine: _Engine) -> None:
        """Place waiting requests on an engine that has room again."""
        waiting = self._waiting.get(engine.number, deque())
        while waiting and engine.num_ongoing < self._scenario.max_ongoing:
            request = waiting.popleft()
            if not request.is_placed:
                self._place(request)

    # Engines

    def _start_engines(self, count: int) -> None:
        for number in itertools.islice(self._numbers, count):
            self._engines[number] = _Engine(number, at=self._now)
        self._set_ring()

    def _start_another(self) -> None:
        def started() -> None:
            self._num_starting -= 1
            self._start_engines(1)

        self._num_starting += 1
        self._later(self._times.start_s, started)

    def _lose_engine(self) -> None:
        """Move its requests to other engines, which prefill them again but keep the tokens generated so far."""
        assert self._scenario.engine_lost_every_s is not None
        self._later(self._scenario.engine_lost_every_s, self._lose_engine)
        if not self._engines:
            return
        engine = self._rng.choice(list(self._engines.values()))
        self._advance(engine)
        del self._engines[engine.number]
        engine.version += 1
        self._set_ring()
        self._num_lost += self._counts
        self._num_handed += sum(request.begun for request in engine.running) * self._counts
        for request in [*engine.running, *engine.queue]:
            self._place(request)
        self._start_another()

    def _scale(self) -> None:
        scenario = self._scenario
        self._later(scenario.look_s, self._scale)
        ongoing = sum(each.num_ongoing for each in self._engines.values()) + len(self._all_waiting())
        wanted = math.ceil(ongoing / (scenario.busy * scenario.max_running))
        wanted = min(max(wanted, scenario.least_engines or 1), scenario.num_engines)
        for _ in range(wanted - len(self._engines) - self._num_starting):
            self._start_another()

    def _set_ring(self) -> None:
        """Rebuild the ring and place waiting requests anew: their candidate engines may have changed."""
        self._ring = Ring(self._engines)
        waiting, self._waiting = self._all_waiting(), {}
        for request in waiting:
            self._place(request)

    def _all_waiting(self) -> list[_Request]:
        """Every waiting request once, though it may be in several queues."""
        found = {id(each): each for queue in self._waiting.values() for each in queue if not each.is_placed}
        return list(found.values())

    # Time on an engine

    def _advance(self, engine: _Engine) -> None:
        """Advance its requests to the current time."""
        elapsed, engine.at = self._now - engine.at, self._now
        if not engine.running or elapsed <= 0:
            return
        share = elapsed / len(engine.running)
        tokens = self._rate(engine) * share  # of each answer
        for request in engine.running:
            if request.prefill > _DONE:
                request.prefill -= share
                if request.prefill <= _DONE and not request.begun:
                    self._record_first_token(request)
            else:
                request.done += tokens

    def _rate(self, engine: _Engine) -> float:
        """Tokens per second of all its answers."""
        return self._rates[sum(request.prefill <= _DONE for request in engine.running)]

    def _record_first_token(self, request: _Request) -> None:
        request.begun = True
        first_s = self._now - request.asked_at
        request.in_time = first_s <= self._scenario.patience_s
        if self._counts:
            self._firsts.append(first_s)

    def _run_queue(self, engine: _Engine) -> None:
        """Start queued requests while there is room; then schedule the next time that a request ends a phase."""
        self._advance(engine)
        while engine.queue and len(engine.running) < self._scenario.max_running:
            engine.running.append(engine.queue.popleft())
        engine.version += 1
        if not engine.running:
            return
        version, num_running = engine.version, len(engine.running)
        rate = self._rate(engine) / num_running  # of each answer
        left = (
            request.prefill * num_running if request.prefill > _DONE else max(0.0, request.tokens - request.done) / rate
            for request in engine.running
        )
        self._later(min(left), lambda: self._step(engine, version))

    def _step(self, engine: _Engine, version: int) -> None:
        if engine.version != version:
            return
        self._advance(engine)
        ended = [each for each in engine.running if each.prefill <= _DONE and each.done >= each.tokens - _DONE * 1e3]
        engine.running = [each for each in engine.running if each not in ended]
        for request in ended:
            self._answered(request)
        self._run_queue(engine)
        if ended:
            self._place_waiting(engine)


@cache  # the same engines and sessions are in every simulation
def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
