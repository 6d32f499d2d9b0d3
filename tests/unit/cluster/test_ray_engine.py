"""Ray's errors for a lost engine, a refused request and another machine, translated into the service's errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from prometheus_client import CollectorRegistry
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectStoreFullError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentID

from tests.fakes import FINISHED, INFO, FakeEngine
from vidspec_models.request import GenerationRequest, Turn, Video
from vidspec_service.api.limits.deadline import background_task
from vidspec_service.cluster import ray_engine
from vidspec_service.cluster.engine_replica import EngineFacts, StreamStart
from vidspec_service.cluster.failover import EngineLost
from vidspec_service.cluster.ray_engine import ENGINES, EngineCall, RayEngine, Traffic, session_id, wait_for_engine
from vidspec_service.engine.types import Activity, GenerationEvent, Phase, PromptReady, TextDelta
from vidspec_service.errors import (
    CapacityError,
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    GenerationFailed,
    RequestError,
)
from vidspec_service.telemetry import Metrics

REQUEST = GenerationRequest(request_id="r", turns=(Turn(role="user", parts=("Say it.",)),))
PROMPT_READY = PromptReady(request_id="r", prompt_tokens=5, video_tokens=0)


@dataclass
class Stream:
    """An engine's stream as a caller sees it: events, or an error."""

    events: list[Any]
    cancelled: bool = False

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        for event in self.events:
            if isinstance(event, Exception) and not isinstance(event, RequestError):
                raise event
            yield [event]

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class ScriptedEngines:
    traffic: Traffic = field(default_factory=Traffic)
    streams: list[Stream] = field(default_factory=list)

    def call(self, *answers: list[Any]) -> EngineCall:
        waiting = [Stream(events) for events in answers]

        def remote(request: GenerationRequest, videos: object) -> Stream:
            self.streams.append(waiting.pop(0))
            return self.streams[-1]

        return EngineCall(SimpleNamespace(generate=SimpleNamespace(remote=remote)), None, self.traffic)


async def heard(call: EngineCall, request: GenerationRequest = REQUEST) -> list[GenerationEvent]:
    async with aclosing(call.ask(request)) as events:
        return [event async for event in events]


def start(numerics: str = "same", clock: float = 0.0) -> StreamStart:
    return StreamStart(numerics=numerics, clock=clock)


def killed_by_serve() -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = "The actor is dead because it was killed by `ray.kill`."
    return error


def on_a_preempted_node() -> ActorDiedError:
    error = ActorDiedError()
    error._preempted = True
    return error


@pytest.mark.parametrize(
    ("error", "is_planned"),
    [
        (ActorDiedError(), False),
        (ActorUnavailableError("socket closed", None), False),
        (killed_by_serve(), True),
        (on_a_preempted_node(), True),
        (RequestCancelledError("r"), True),
        (RayTaskError("generate", "", EngineDead("no target")), False),
    ],
)
def test_an_engine_that_is_gone_is_lost_and_whether_that_was_planned_is_known(
    error: Exception, is_planned: bool
) -> None:
    told = ScriptedEngines()
    with pytest.raises(EngineLost) as lost:
        asyncio.run(heard(told.call([start(), PROMPT_READY, error])))
    assert lost.value.is_planned is is_planned
    assert told.traffic.num_running == told.traffic.num_waiting == 0
    assert told.traffic.outage_s > 0.0, "it goes on until another one is heard"


def test_where_no_engine_can_be_started_the_target_is_dead() -> None:
    with pytest.raises(EngineDead):
        asyncio.run(heard(ScriptedEngines().call([DeploymentUnavailableError(DeploymentID(ENGINES))])))


def test_a_frontend_waits_for_an_engine_as_long_as_the_operator_says() -> None:
    starting = SimpleNamespace(facts=SimpleNamespace(remote=lambda: asyncio.sleep(20)))
    with pytest.raises(ConfigError, match="start-timeout"):
        asyncio.run(wait_for_engine(starting, 0.01))


@pytest.mark.parametrize(
    "error", [ContextLengthExceeded("too long"), RayTaskError("generate", "", GenerationFailed("too long"))]
)
def test_what_an_engine_refuses_is_refused_as_by_an_engine_of_our_own(error: Exception) -> None:
    told = ScriptedEngines()
    with pytest.raises((ContextLengthExceeded, GenerationFailed), match="too long"):
        asyncio.run(heard(told.call([start(), error])))
    assert told.traffic.outage_s == 0.0


def test_an_error_that_nobody_foresaw_is_not_hidden() -> None:
    with pytest.raises(RayTaskError):
        asyncio.run(heard(ScriptedEngines().call([start(), RayTaskError("generate", "", ValueError("a bug"))])))


def test_an_answer_does_not_go_on_where_roundings_are_others() -> None:
    call = ScriptedEngines().call(
        [start("one"), PROMPT_READY],
        [start("one"), PROMPT_READY],
        [start("another"), PROMPT_READY],
        [start("another"), PROMPT_READY],
    )
    asyncio.run(heard(call))
    begun = replace(REQUEST, committed=(1, 2))
    assert asyncio.run(heard(call, begun)) == [PROMPT_READY]
    with pytest.raises(GenerationFailed, match="rounds differently"):
        asyncio.run(heard(call, begun))
    assert asyncio.run(heard(call)) == [PROMPT_READY]  # no token has been sent: any engine may begin


def test_times_of_an_engine_are_told_on_the_clock_of_the_frontend() -> None:
    work = Activity(request_id="r", worker="target", phase=Phase.VERIFY, start=1e6, end=1e6 + 0.5, num_tokens=3)
    before_s = time.monotonic()
    (told,) = asyncio.run(heard(ScriptedEngines().call([start(clock=1e6), work])))
    assert isinstance(told, Activity)
    assert told.end - told.start == pytest.approx(0.5)
    assert before_s - 0.001 <= told.start <= time.monotonic() + 0.001  # but for rounding


def test_a_caller_that_leaves_cancels_the_work_of_the_engine() -> None:
    told = ScriptedEngines()
    call = told.call([start(), PROMPT_READY, TextDelta(text="a", num_tokens=1)])

    async def leave() -> None:
        async with aclosing(call.ask(REQUEST)) as events:
            await anext(events)
            assert told.traffic.num_running == 1

    asyncio.run(leave())
    assert told.streams[0].cancelled
    assert told.traffic.num_running == 0


def test_no_two_calls_are_in_the_context_of_one_http_request() -> None:
    """Ray's router identifies calls by the request in their context, and loses one of two that wait at once."""
    of_http: ContextVar[str] = ContextVar("of_http", default="none")
    seen: list[str] = []

    def remote(*_: object) -> Stream:
        seen.append(of_http.get())
        of_http.set("the call's own")
        return Stream([start(), PROMPT_READY])

    async def both() -> None:
        of_http.set("the client's")
        engines = SimpleNamespace(generate=SimpleNamespace(remote=remote))
        for _ in range(2):
            await heard(EngineCall(engines, None, Traffic()))
        assert of_http.get() == "the client's"

    asyncio.run(both())
    assert seen == ["none", "none"]


def frontends_engine(registry: CollectorRegistry, engines: object = None, *, may_sleep: bool = False) -> RayEngine:
    facts = EngineFacts(info=INFO, tokenizer=FakeEngine().tokenizer.to_str())
    return RayEngine(engines, facts, Metrics(registry), may_sleep=may_sleep)


def test_what_drafts_brought_to_every_answer_is_counted_by_its_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda videos: videos)
    called = SimpleNamespace(generate=SimpleNamespace(remote=lambda *_: Stream([start(), PROMPT_READY, FINISHED])))
    registry = CollectorRegistry()
    engine = frontends_engine(registry, SimpleNamespace(options=lambda **_: called))

    async def ask() -> None:
        async for _ in engine.generate(replace(REQUEST, n=2)):
            pass

    asyncio.run(ask())
    stats = FINISHED.speculation
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert registry.get_sample_value(f"vidspec:spec_decode_{name}_total") == 2 * getattr(stats, name), name


def test_a_cluster_without_room_for_the_frames_is_busy_and_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise ObjectStoreFullError

    async def ask() -> None:
        async for _ in frontends_engine(CollectorRegistry()).generate(REQUEST):
            pass

    monkeypatch.setattr(ray, "put", refuse)
    with pytest.raises(CapacityError, match="no room"):
        asyncio.run(ask())


def test_a_frontend_is_ready_while_there_are_engines_or_a_request_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"RUNNING": 1}
    app = SimpleNamespace(deployments={ENGINES: SimpleNamespace(replica_states=states)})
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"app": app}))
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="app"))
    monkeypatch.setattr(ray_engine, "_COUNT_EVERY_S", 0.001)
    awake, sleepy = (frontends_engine(CollectorRegistry(), may_sleep=may_sleep) for may_sleep in (False, True))

    async def scenario() -> None:
        async with (
            asyncio.timeout(20),
            background_task(sleepy.count_engines()),
            background_task(awake.count_engines()),
        ):
            assert awake.status().is_ready
            for num in (0, 1):
                states.clear()
                states.update({"RUNNING": 1} if num else {})  # Ray leaves out what there is none of
                while awake.status().is_ready != bool(num):  # noqa: ASYNC110  Ray has no event for this
                    await asyncio.sleep(0.001)
                assert sleepy.status().is_ready
            app.deployments.clear()  # the application is being deleted
            while awake.status().is_ready:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    asyncio.run(scenario())


def test_the_time_from_a_lost_engine_to_the_next_word_is_an_outage() -> None:
    traffic = Traffic()
    traffic.began("r")
    assert traffic.num_waiting == 1
    traffic.lost_engine()
    before = traffic.outage_s
    assert 0.0 <= before < 20.0
    while traffic.outage_s <= before + 0.001:
        pass
    traffic.lost_engine()
    assert traffic.outage_s > before + 0.001, "the loss of another one does not begin it anew"
    traffic.heard("r", PROMPT_READY)
    after = traffic.outage_s
    assert after > before
    assert traffic.outage_s == after
    assert (traffic.num_running, traffic.num_waiting) == (1, 0)


def test_questions_about_one_video_have_one_session_and_others_have_others() -> None:
    def about(key: str | None, request_id: str = "r") -> str:
        video = Video(
            frames=np.zeros((1, 2, 2, 3), np.uint8),
            source_indices=(0,),
            source_fps=1.0,
            source_num_frames=1,
            duration_s=1.0,
            key=key,
        )
        return session_id(replace(REQUEST, request_id=request_id, videos=(video, replace(video, key="second"))))

    assert about("a", "r1") == about("a", "r2") != about("b")
    assert about(None, "r1") != about(None, "r2")


def test_a_talk_without_videos_has_a_session_of_its_own_for_each_caller() -> None:
    later = replace(REQUEST, turns=(*REQUEST.turns, Turn(role="assistant", parts=("It.",))))
    assert session_id(REQUEST) == session_id(later) != session_id(replace(REQUEST, caller="another"))
    rules = Turn(role="system", parts=("Be brief.",))
    others = replace(REQUEST, turns=(rules, Turn(role="user", parts=("Say another.",))))
    assert session_id(replace(REQUEST, turns=(rules, *REQUEST.turns))) == session_id(REQUEST) != session_id(others)
