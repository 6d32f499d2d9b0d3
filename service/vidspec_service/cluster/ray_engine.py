"""RayEngine: the `Engine` that the API gets where the engines are replicas of a Ray Serve deployment, on any node."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import Context
from dataclasses import replace

import ray
from ray import serve
from ray.exceptions import ObjectStoreFullError, RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from tokenizers import Tokenizer

from vidspec_models.request import GenerationRequest
from vidspec_service.cluster.engine_replica import EngineFacts, Reply, StreamStart
from vidspec_service.cluster.failover import EngineLost, generate_with_failover
from vidspec_service.engine.frontend.interface import EngineStatus, WorkerState
from vidspec_service.engine.frontend.merge_streams import merge_streams
from vidspec_service.engine.types import Activity, Finished, GenerationEvent, PromptReady
from vidspec_service.errors import CapacityError, ConfigError, EngineDead, GenerationFailed, RequestError, ServiceError
from vidspec_service.telemetry import Metrics

ENGINES = "Engine"  # the deployment's name
_COUNT_EVERY_S = 2.0  # how often the engines are counted
_ENDED_ON_PURPOSE = "ray.kill"  # in Ray's error if Serve ended it: for an update, a smaller number, a failed check

_log = logging.getLogger(__name__)


async def wait_for_engine(engines: DeploymentHandle, timeout_s: float) -> EngineFacts:
    """Returns as soon as one engine is ready; raises ConfigError if none is in time."""
    try:
        async with asyncio.timeout(timeout_s):
            facts: EngineFacts = await engines.facts.remote()
    except TimeoutError:
        raise ConfigError(f"no engine was ready within {timeout_s:g} s (--start-timeout-s)") from None
    return facts


class RayEngine:
    """Implements `Engine`. Belongs to one event loop, as a `LocalEngine` does."""

    def __init__(self, engines: DeploymentHandle, facts: EngineFacts, metrics: Metrics, *, may_sleep: bool) -> None:
        """`may_sleep`: having no engine at all is no fault; the next request starts one."""
        self.info = facts.info
        self.tokenizer = Tokenizer.from_str(facts.tokenizer)
        self._engines = engines
        self._metrics = metrics
        self._may_sleep = may_sleep
        self._num_engines = 1
        self._traffic = Traffic()

    def status(self) -> EngineStatus:
        """See `Engine`: the state of all engines together, and the requests that came through this frontend."""
        is_there = self._num_engines > 0 or self._may_sleep
        return EngineStatus(
            workers={"target": WorkerState.READY if is_there else WorkerState.STARTING},
            num_running=self._traffic.num_running,
            num_waiting=self._traffic.num_waiting,
            outage_s=self._traffic.outage_s,
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `Engine.generate`."""
        session = session_id(request)
        try:
            # Stored once, for all answers and for all engines that may have to continue one.
            videos = await asyncio.to_thread(ray.put, request.videos)
        except ObjectStoreFullError as error:
            raise CapacityError("The cluster has no room for the request at the moment; try again.") from error
        request = replace(request, videos=())
        engines = self._engines.options(stream=True, session_id=session)
        calls = [EngineCall(engines, videos, self._traffic) for _ in range(request.n)]
        answers = [generate_with_failover(request.choice(index), call.ask, index) for index, call in enumerate(calls)]
        async with aclosing(merge_streams(answers)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    self._count(event)
                yield event

    def _count(self, event: Finished) -> None:
        """Count what is known here; accepted tokens by position are not."""
        stats = event.speculation
        self._metrics.spec_decode_num_drafts.inc(stats.num_drafts)
        self._metrics.spec_decode_num_draft_tokens.inc(stats.num_draft_tokens)
        self._metrics.spec_decode_num_accepted_tokens.inc(stats.num_accepted_tokens)

    async def count_engines(self) -> None:
        """Count the engines now and then, until cancelled: readiness depends on it."""
        app = serve.get_replica_context().app_name
        while True:
            try:
                status = await asyncio.to_thread(serve.status)
                engines = status.applications[app].deployments.get(ENGINES)  # None while the application is deleted
                self._num_engines = engines.replica_states.get("RUNNING", 0) if engines else 0
            except Exception as error:  # whatever the controller's fault is: Ray restarts it, and it is asked again
                _log.warning("the engines cannot be counted", extra={"why": str(error)})
            await asyncio.sleep(_COUNT_EVERY_S)


class EngineCall:
    """Asks the engines for one answer."""

    def __init__(self, engines: DeploymentHandle, videos: ray.ObjectRef, traffic: Traffic) -> None:
        self._engines = engines
        self._videos = videos
        self._traffic = traffic
        self._numerics: str | None = None  # of the engine that began the answer

    async def ask(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `failover.Ask`."""
        name = request.request_id
        self._traffic.began(name)
        ahead_s = 0.0
        stream = None
        try:
            # In a context of its own: Ray's router (2.60) tells the calls that wait for an engine apart by the HTTP
            # request in their context, and would forget one of two.
            stream = Context().run(self._engines.generate.remote, request, self._videos)
            batches = aiter(stream)
            batch = await anext(batches, None)
            while batch is not None:
                for event in batch:
                    if isinstance(event, StreamStart):
                        self._check(event, request)
                        ahead_s = event.clock - time.monotonic()
                        continue
                    yield _on_our_clock(self._heard(name, event), ahead_s)
                batch = await anext(batches, None)
        except RayTaskError as error:
            if isinstance(error.cause, EngineDead):
                raise self._lost(error.cause.message, is_planned=False) from error
            raise (error.cause if isinstance(error.cause, ServiceError) else error) from None
        except RayActorError as error:
            why = str(error)
            raise self._lost(why.splitlines()[-1], is_planned=error.preempted or _ENDED_ON_PURPOSE in why) from error
        except TaskCancelledError as error:  # by Ray: a caller that leaves does not come here
            raise self._lost("its stream was cancelled", is_planned=True) from error
        except DeploymentUnavailableError as error:
            raise EngineDead(f"no engine can be started: {error}") from error
        finally:
            if stream is not None:
                stream.cancel()
            self._traffic.ended(name)

    def _heard(self, name: str, reply: Reply) -> GenerationEvent:
        if isinstance(reply, RequestError):
            raise reply
        self._traffic.heard(name, reply)
        return reply

    def _check(self, start: StreamStart, request: GenerationRequest) -> None:
        if request.committed and self._numerics not in (None, start.numerics):
            raise GenerationFailed("the engine that began the answer is gone, and the remaining one rounds differently")
        self._numerics = start.numerics

    def _lost(self, why: str, *, is_planned: bool) -> EngineLost:
        _log.warning(
            "an engine was lost; another one continues its answer", extra={"why": why, "is_planned": is_planned}
        )
        self._traffic.lost_engine()
        return EngineLost(is_planned=is_planned)


class Traffic:
    """A frontend's requests to the engines, and how long it was without a lost engine. Pure but for the clock."""

    def __init__(self) -> None:
        self._is_accepted: dict[str, bool] = {}
        self._lost_at: float | None = None
        self._outages_s = 0.0

    @property
    def num_running(self) -> int:
        return sum(self._is_accepted.values())

    @property
    def num_waiting(self) -> int:
        return len(self._is_accepted) - self.num_running

    @property
    def outage_s(self) -> float:
        """Total time from the loss of an engine until an engine was heard again."""
        return self._outages_s + (0.0 if self._lost_at is None else time.monotonic() - self._lost_at)

    def began(self, name: str) -> None:
        """A request is on its way."""
        self._is_accepted[name] = False

    def heard(self, name: str, event: GenerationEvent) -> None:
        """An engine is there, and sent this event of a request."""
        self._outages_s, self._lost_at = self.outage_s, None
        self._is_accepted[name] |= isinstance(event, PromptReady)

    def lost_engine(self) -> None:
        """An engine is gone, and its requests now wait for another."""
        self._lost_at = self._lost_at or time.monotonic()

    def ended(self, name: str) -> None:
        """Nothing more is heard of a request."""
        self._is_accepted.pop(name, None)


def session_id(request: GenerationRequest) -> str:
    """Equal for requests that may share features and KV rows: the first video's key, else from the question."""
    if request.videos:
        return request.videos[0].key or request.request_id
    first = next(((turn.text, turn.token_ids) for turn in request.turns if turn.role == "user"), "")
    return hashlib.sha256(f"{request.caller}\n{first}".encode()).hexdigest()


def _on_our_clock(event: GenerationEvent, ahead_s: float) -> GenerationEvent:
    if isinstance(event, Activity):
        return replace(event, start=event.start - ahead_s, end=event.end - ahead_s)
    return event
