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

from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.launcher import WorkerLauncher
from vidspec_service.engine.frontend.output_processor import OutputProcessor
from vidspec_service.engine.frontend.request_table import RequestMessage, RequestState, RequestTable
from vidspec_service.engine.frontend.supervisor import Worker
from vidspec_service.engine.frontend.workers import common_tokenizer, configure_messages, engine_info
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import (
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
from vidspec_service.engine.ipc.payload import payload_of
from vidspec_service.engine.types import Accepted, EngineInfo, EngineStatus, Finished, GenerationEvent, WorkerState
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
        launcher: WorkerLauncher | None = None,
    ) -> None:
        """A `launcher` that is given may start the workers of other engines, too; it stays open."""
        self._config = config
        self._metrics = metrics
        self._on_trace = on_trace
        self._on_loading = on_loading
        self._table = RequestTable(config.max_running_requests)
        self._launcher = launcher or WorkerLauncher()
        self._owns_launcher = launcher is None
        self._workers: dict[str, Worker] = {}
        self._ready: dict[str, Ready] = {}
        self._started: asyncio.Future[None] | None = None
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None

    async def __aenter__(self) -> EngineClient:
        self._started = asyncio.get_running_loop().create_future()
        for configure in configure_messages(self._config, trace=self._on_trace is not None):
            worker = self._workers[configure.role] = Worker(configure, self._launcher, self)
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
        self._table.fail_all(EngineDead("the server is shutting down"))
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        if self._owns_launcher:
            self._launcher.close()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("the engine is not ready")
        return self._info

    def status(self) -> EngineStatus:
        running = sum(state.is_accepted for state in self._table)
        return EngineStatus(
            workers={role: worker.state for role, worker in self._workers.items()},
            num_running=running,
            num_waiting=len(self._table) - running,
        )

    def worker_pids(self) -> dict[str, int | None]:
        """For operators and for tests that kill workers."""
        return {role: worker.pid for role, worker in self._workers.items()}

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `Engine.generate`."""
        if self._tokenizer is None or self._workers["target"].state is WorkerState.DEAD:
            raise EngineDead("the target worker is gone and cannot be brought back")
        request = replace(request, speculation=self._mode(request))
        output = OutputProcessor(self._tokenizer, request)
        payload = await payload_of(request)
        request = replace(request, videos=())  # the frames are in shared memory now; do not hold them twice
        state = RequestState(request, payload)
        with self._table.registered(state):
            try:
                self._submit(state)
                event: GenerationEvent | None = None
                while not isinstance(event, Finished):
                    for event in output.process(await state.messages.get()):
                        yield event
            finally:
                if self._table.remove(state.request_id):
                    for worker in self._workers.values():
                        worker.send(Cancel(request_id=state.request_id))
                    self._hand_over()

    def _submit(self, state: RequestState) -> None:
        """To the draft first, so that it knows the request when the target's first verdict comes."""
        draft = self._workers.get("draft")
        if draft is not None and state.wants_draft:
            draft.send(state.message(), (state.payload,))
        self._hand_over()

    def _hand_over(self) -> None:
        """Give the target all that it may have now; what it cannot take waits for it, or for the next one."""
        send = self._workers["target"].send
        while (state := self._table.next_due()) is not None and send(state.message(), (state.payload,)):
            self._table.mark_given(state)

    def worker_ready(self, worker: Worker, ready: Ready) -> None:
        """A worker (again) takes work: introduce the two to each other, hand it what is in flight."""
        if worker.role in self._ready:
            self._metrics.worker_restarts.labels(worker.role).inc()
        self._ready[worker.role] = ready
        if self._info is None and len(self._ready) == len(self._workers):
            self._open()
        for state in self._table:
            if worker.role == "draft" and state.wants_draft:
                worker.send(state.message(), (state.payload,))
        self._hand_over()
        self._introduce()

    def worker_said(self, worker: Worker, message: Message) -> None:
        """Route an event to its request."""
        match message:
            case Accepted() | Rejected() | Tokens() | Ended():
                if self._table.route(message):
                    self._observe(message)
                    self._hand_over()
            case Heartbeat():
                idle = max(0.0, 1 - message.busy_s / message.elapsed_s)
                self._metrics.worker_idle_ratio.labels(worker.role).set(idle)
                used = message.cache_tokens / self._config.kv_cache_tokens
                self._metrics.kv_cache_usage_perc.labels(worker.role).set(used)
                for seconds in message.forward_s:
                    self._metrics.forward[worker.role].observe(seconds)
            case Loading():
                self._on_loading(worker.role, message.what, message.fraction)
            case Trace() if self._on_trace is not None:
                self._on_trace(worker.role, message)

    def _observe(self, message: RequestMessage) -> None:
        if isinstance(message, Tokens) and message.num_judged:
            count_verified(self._metrics, num_draft_tokens=message.num_judged, num_accepted_tokens=message.num_accepted)
        elif isinstance(message, Ended):
            self._metrics.spec_decode_rollbacks.inc(message.num_rollbacks)
            self._metrics.spec_decode_wasted_draft_tokens.inc(message.num_wasted)
        elif isinstance(message, Rejected) and "draft" in self._workers:
            self._workers["draft"].send(Cancel(request_id=message.request_id))

    def worker_lost(self, worker: Worker) -> bool:
        """It will be started again; requests wait (target) or go on alone (draft). True if a request is to blame."""
        logger.warning("%s worker lost with %d requests in flight", worker.role, len(self._table))
        if worker.role == "draft":
            self._table.draft_lost()
            return False
        culprit = self._table.target_lost()
        if culprit is not None:
            logger.error("request %s is refused: the target ended on its way to the same place again", culprit)
            self.worker_said(worker, Rejected(request_id=culprit, message="it ends the model's process"))
        return culprit is not None

    def worker_dead(self, worker: Worker, reason: str) -> None:
        """It cannot be brought back."""
        if self._started is not None and not self._started.done():
            self._started.set_exception(ConfigError(reason))
        if worker.role == "target":
            self._table.fail_all(EngineDead(reason))

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
        if not self._ready["target"].is_batch_invariant:
            logger.warning("this device is not batch-invariant: speculation may change text at near-ties")
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


def count_verified(metrics: Metrics, *, num_draft_tokens: int, num_accepted_tokens: int) -> None:
    """One verification that judged at least one draft token; `SpeculationStats` defines judged and accepted."""
    metrics.spec_decode_num_drafts.inc()
    metrics.spec_decode_num_draft_tokens.inc(num_draft_tokens)
    metrics.spec_decode_num_accepted_tokens.inc(num_accepted_tokens)
    for position in range(num_accepted_tokens):
        metrics.spec_decode_num_accepted_tokens_per_pos.labels(str(position)).inc()
