"""EngineClient: the engine as the API process sees it. Owns the workers, routes their events to requests.

Runs on one event loop: worker channels are read by loop callbacks, so nothing here needs a lock. Every request's
payload and committed tokens are kept until it ends; that is what lets a restarted worker take it up again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from tokenizers import Tokenizer

from vidspec_service.engine.channels import Channel
from vidspec_service.engine.detokenizer import Detokenizer
from vidspec_service.engine.generating import generate_message
from vidspec_service.engine.inflight import Inflight, Pending
from vidspec_service.engine.messages import (
    Accepted,
    Cancel,
    Ended,
    Heartbeat,
    Loading,
    Message,
    Peer,
    Ready,
    Rejected,
    Tokens,
    Trace,
)
from vidspec_service.engine.pairing import common_tokenizer, engine_info
from vidspec_service.engine.payload import payload_of
from vidspec_service.engine.reply import replies
from vidspec_service.engine.roles import configures
from vidspec_service.engine.supervisor import Worker
from vidspec_service.engine.types import (
    EngineConfig,
    EngineInfo,
    EngineStatus,
    GenerationEvent,
    GenerationRequest,
    SpeculationMode,
    WorkerState,
)
from vidspec_service.errors import ConfigError, EngineDead
from vidspec_service.telemetry import Metrics

OnTrace = Callable[[str, Trace], None]  # role, what its worker did
OnLoading = Callable[[str, str, float | None], None]  # role, what its worker does, the share that is done

logger = logging.getLogger(__name__)


class EngineClient:
    """Implements `Engine`. Use as `async with EngineClient(...)`: entering waits until the workers are ready."""

    def __init__(
        self,
        config: EngineConfig,
        metrics: Metrics,
        on_trace: OnTrace | None = None,
        on_loading: OnLoading = lambda _role, _what, _fraction: None,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._on_trace = on_trace
        self._on_loading = on_loading
        self._inflight = Inflight(config.max_running)
        self._workers: dict[str, Worker] = {}
        self._ready: dict[str, Ready] = {}
        self._started: asyncio.Future[None] | None = None
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None

    async def __aenter__(self) -> EngineClient:
        self._started = asyncio.get_running_loop().create_future()
        for configure in configures(self._config):
            worker = Worker(
                replace(configure, trace=self._on_trace is not None),
                self,
                silence_s=self._config.silence_s,
                start_timeout_s=self._config.start_timeout_s,
            )
            self._workers[worker.role] = worker
            worker.start()
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._started
        except TimeoutError:
            await self.close()
            limit = self._config.start_timeout_s
            raise ConfigError(f"the workers were not ready within start_timeout_s = {limit:g} s") from None
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the workers; requests in flight fail with EngineDead."""
        self._inflight.fail_all(EngineDead("the server is shutting down"))
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("the engine is not ready")
        return self._info

    def status(self) -> EngineStatus:
        running = sum(pending.is_accepted for pending in self._inflight)
        return EngineStatus(
            workers={role: worker.state for role, worker in self._workers.items()},
            num_running=running,
            num_waiting=len(self._inflight) - running,
        )

    def worker_pids(self) -> dict[str, int | None]:
        """For operators and for tests that kill workers."""
        return {role: worker.pid for role, worker in self._workers.items()}

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `Engine.generate`."""
        if self._tokenizer is None or self._workers["target"].state is WorkerState.DEAD:
            raise EngineDead("the target worker is gone and cannot be brought back")
        detokenizer = Detokenizer(self._tokenizer, request.stop)
        pending = Pending(generate_message(request, self._mode(request)), await payload_of(request))
        request = replace(request, videos=())  # the frames are in shared memory now; do not hold them twice
        with self._inflight.registered(pending):
            try:
                self._submit(pending)
                async for event in replies(pending, detokenizer):
                    yield event
            finally:
                if self._inflight.forget(request.request_id):
                    for worker in self._workers.values():
                        worker.send(Cancel(request_id=request.request_id))
                    self._hand_over()

    def _submit(self, pending: Pending) -> None:
        """To the draft first, so that it knows the request when the target's first verdict comes."""
        draft = self._workers.get("draft")
        if draft is not None and pending.wants_draft:
            draft.send(pending.message, (pending.payload,))
        self._hand_over()

    def _hand_over(self) -> None:
        """Give the target all that it may have now; what it cannot take waits for it, or for the next one."""
        send = self._workers["target"].send
        while (pending := self._inflight.due()) is not None and send(pending.resumed(), (pending.payload,)):
            self._inflight.gave(pending)

    def worker_ready(self, worker: Worker, ready: Ready) -> None:
        """A worker (again) takes work: introduce the two to each other, hand it what is in flight."""
        if worker.role in self._ready:
            self._metrics.worker_restarted(worker.role)
        self._ready[worker.role] = ready
        if self._info is None and len(self._ready) == len(self._workers):
            self._open()
        for pending in self._inflight:
            if worker.role == "draft" and pending.wants_draft:
                worker.send(pending.message, (pending.payload,))
        self._hand_over()
        self._introduce()

    def worker_said(self, worker: Worker, message: Message) -> None:
        """Route an event to its request."""
        match message:
            case Accepted() | Rejected() | Tokens() | Ended():
                if self._inflight.route(message):
                    self._observe(message)
                    self._hand_over()
            case Heartbeat():
                self._metrics.idle(worker.role, max(0.0, 1 - message.busy_s / message.elapsed_s))
                self._metrics.kv_use(worker.role, message.cache_tokens / self._config.kv_tokens)
                for seconds in message.forward_s:
                    self._metrics.forward(worker.role, seconds)
            case Loading():
                self._on_loading(worker.role, message.what, message.fraction)
            case Trace() if self._on_trace is not None:
                self._on_trace(worker.role, message)

    def _observe(self, message: Accepted | Rejected | Tokens | Ended) -> None:
        if isinstance(message, Tokens) and message.num_proposed:
            self._metrics.verified(num_proposed=message.num_proposed, num_accepted=message.num_accepted)
        elif isinstance(message, Ended):
            self._metrics.rolled_back(message.num_rollbacks, message.num_wasted)
        elif isinstance(message, Rejected) and "draft" in self._workers:
            self._workers["draft"].send(Cancel(request_id=message.request_id))

    def worker_lost(self, worker: Worker) -> bool:
        """It will be started again; requests wait (target) or go on alone (draft). True if a request is to blame."""
        logger.warning("%s worker lost with %d requests in flight", worker.role, len(self._inflight))
        if worker.role == "draft":
            self._inflight.draft_lost()
            return False
        culprit = self._inflight.target_lost()
        if culprit is not None:
            logger.error("request %s is refused: the target ended on its way to the same place again", culprit)
            self.worker_said(worker, Rejected(request_id=culprit, kind="failed", message="it ends the model's process"))
        return culprit is not None

    def worker_dead(self, worker: Worker, reason: str) -> None:
        """It cannot be brought back."""
        if self._started is not None and not self._started.done():
            self._started.set_exception(ConfigError(reason))
        if worker.role == "target":
            self._inflight.fail_all(EngineDead(reason))

    def _introduce(self) -> None:
        """Give both workers the ends of a new channel."""
        workers = [self._workers.get("draft"), self._workers["target"]]
        if any(worker is None or worker.state is not WorkerState.READY for worker in workers):
            return
        ends = Channel.pair()
        for worker, end in zip(workers, ends, strict=True):
            if worker is not None:
                worker.send(Peer(), (end.fileno(),))
            end.close()

    def _open(self) -> None:
        """All workers are there for the first time."""
        if not self._ready["target"].rows_are_invariant:
            logger.warning("no row rule holds on this device: speculation may change text at near-ties")
        if self._started is None or self._started.done():
            return
        try:
            self._tokenizer = common_tokenizer(self._ready)
            self._info = engine_info(self._config, self._ready)
        except ConfigError as error:
            self._started.set_exception(error)
        else:
            self._started.set_result(None)

    def _mode(self, request: GenerationRequest) -> SpeculationMode:
        if "draft" not in self._workers:
            return SpeculationMode.OFF
        return self._config.speculation if request.speculation is SpeculationMode.AUTO else request.speculation
