"""LocalEngine: owns the pair of workers, and handles requests on the API's side of them.

It submits a request, routes the workers' events back to it, and cancels it on the workers when nobody waits for it. It
starts the workers, connects them to each other and ends them. A restarted worker gets the requests of the last one,
so every request's payload and committed tokens are kept until it ends. Runs on one event loop, whose callbacks read the
worker channels, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from tokenizers import Tokenizer

from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.interface import EngineInfo, EngineStatus, WorkerState
from vidspec_service.engine.frontend.output_processor import OutputProcessor, drain, grouped
from vidspec_service.engine.frontend.request_table import QueueItem, RequestState, RequestTable
from vidspec_service.engine.frontend.supervisor import WorkerLauncher, WorkerSupervisor
from vidspec_service.engine.frontend.tokens import with_token_ids
from vidspec_service.engine.frontend.workers import (
    configure_messages,
    engine_info,
    require_one_vocabulary,
    share_gpu,
    worker_configs,
)
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import (
    Ended,
    Heartbeat,
    Loaded,
    Loading,
    Message,
    Peer,
    Ready,
    Rejected,
    Tokens,
)
from vidspec_service.engine.ipc.payload import payload_of
from vidspec_service.engine.kv_budget import KVBudgets
from vidspec_service.engine.types import Activity, DraftView, Finished, GenerationEvent, PromptReady
from vidspec_service.errors import ConfigError, EngineDead
from vidspec_service.telemetry import EngineMetrics

OnHeartbeat = Callable[[str, Heartbeat], None]  # role, what its worker did
OnLoading = Callable[[str, str, float | None], None]  # role, what its worker is loading, the fraction done

logger = logging.getLogger(__name__)


class LocalEngine:
    """Implements `Engine`. Use as `async with LocalEngine(...)`: entering waits until the workers are ready."""

    _started: asyncio.Future[None]

    def __init__(
        self,
        config: EngineConfig,
        metrics: EngineMetrics,
        on_heartbeat: OnHeartbeat = lambda *_: None,
        on_loading: OnLoading = lambda *_: None,
        launcher: WorkerLauncher | None = None,
    ) -> None:
        """A given `launcher` may also start the workers of other engines; it stays open when this engine closes."""
        self._config = config
        self._metrics = metrics
        self._on_heartbeat = on_heartbeat
        self._on_loading = on_loading
        self._launcher = launcher or WorkerLauncher(config.log_format)
        self._owns_launcher = launcher is None
        self._table = RequestTable(config.max_running_requests)
        self._workers: dict[str, WorkerSupervisor] = {}
        self._ready: dict[str, Ready] = {}
        self._budgets = KVBudgets(worker_configs(config), config.gpu_memory_utilization, config.kv_cache_tokens)
        self._tokenizer: Tokenizer | None = None  # known, like `_info`, once the workers are ready
        self._info: EngineInfo | None = None
        self._lost_at: float | None = None  # when the target was lost; None while there is one
        self._outage_s = 0.0  # total of earlier outages
        self._connected_at = 0.0

    async def __aenter__(self) -> LocalEngine:
        self._started = asyncio.get_running_loop().create_future()
        for configure in configure_messages(self._config):
            worker = self._workers[configure.role] = WorkerSupervisor(configure, self._launcher, self)
            worker.start()
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._started
        except BaseException as error:
            await self.close()
            if not isinstance(error, TimeoutError):
                raise
            limit = self._config.start_timeout_s
            raise ConfigError(
                f"the workers were not ready within {limit:g} s; for slow devices or downloads, raise --start-timeout-s"
            ) from None
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
        """See `Engine`."""
        if self._info is None:
            raise EngineDead("the engine is not ready")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Engine`."""
        if self._tokenizer is None:
            raise EngineDead("the engine is not ready")
        return self._tokenizer

    def status(self) -> EngineStatus:
        """See `Engine`."""
        lost_s = 0.0 if self._lost_at is None else time.monotonic() - self._lost_at
        running = sum(state.is_running for state in self._table)
        return EngineStatus(
            workers={role: worker.state for role, worker in self._workers.items()},
            num_running=running,
            num_waiting=len(self._table) - running,
            step_paths={role: ready.step_path for role, ready in self._ready.items()},
            outage_s=self._outage_s + lost_s,
        )

    def worker_pids(self) -> dict[str, int | None]:
        """For operators and for tests that kill workers."""
        return {role: worker.pid for role, worker in self._workers.items()}

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `Engine.generate`."""
        tokenizer = self.tokenizer
        request = replace(request, speculation=self._mode(request))
        if request.names_tokens:
            request = await asyncio.to_thread(with_token_ids, request, tokenizer)
        payload = await payload_of(request)
        request = replace(request, videos=())  # the frames are in shared memory
        messages: asyncio.Queue[QueueItem] = asyncio.Queue()
        states = [RequestState(request.choice(index), payload, index, messages) for index in range(request.n)]
        running = {
            each.request_id: OutputProcessor(tokenizer, each.request, self._metrics, each.choice) for each in states
        }
        with self._table.registered(*states):
            try:
                # Checked here, since no await follows before the send: a target given up later fails all requests here.
                if self._workers["target"].state is WorkerState.DEAD:
                    raise EngineDead("the target worker is gone and cannot be brought back")
                for state in states:
                    self._send_to_draft(state)  # before the target, whose first verdict may come at once
                self._send_due()
                while running:
                    for group in grouped(await drain(messages)):
                        request_id = group[0].request_id
                        if (output := running.get(request_id)) is None:
                            continue  # a stop string has ended this answer
                        for event in output.process(group):
                            yield event
                            if isinstance(event, Finished):
                                del running[request_id]
                                self._forget(request_id)
            finally:
                for state in states:
                    self._forget(state.request_id)

    def _mode(self, request: GenerationRequest) -> SpeculationMode:
        if "draft" not in self._workers and not self._config.has_ngram_draft:
            return SpeculationMode.OFF
        return self._config.speculation if request.speculation is SpeculationMode.AUTO else request.speculation

    def _send_to_draft(self, state: RequestState) -> None:
        if state.wants_draft and "draft" in self._workers:
            state.has_draft = state.send_via(self._workers["draft"].send)

    def _send_due(self) -> None:
        """Send the target every request that is due; what it cannot take waits until it can, or for the next target."""
        send = self._workers["target"].send
        while (state := self._table.next_due()) is not None and state.send_via(send):
            self._table.mark_sent(state)

    def _forget(self, request_id: str) -> None:
        """Remove a request that nobody waits for any more; cancel it on the workers if it has not ended."""
        if self._table.remove(request_id):
            for worker in self._workers.values():
                worker.cancel(request_id)
            self._send_due()

    def on_worker_message(self, worker: WorkerSupervisor, message: Message) -> None:
        """Route an event to its request. If one worker has lost the other, which did not read, connect them again."""
        match message:
            case PromptReady() | Rejected() | Tokens() | Ended() | Activity() | DraftView():
                if self._table.route(message):
                    if isinstance(message, Ended | Rejected) and "draft" in self._workers:
                        self._workers["draft"].cancel(message.request_id)
                    self._send_due()
            case Heartbeat():
                idle = max(0.0, 1 - message.busy_s / message.elapsed_s)
                self._metrics.worker_idle_ratio.labels(worker.role).set(idle)
                self._metrics.kv_cache_usage_perc.labels(worker.role).set(message.cache_usage)
                for start, end, _ in message.forwards:
                    self._metrics.forward[worker.role].observe(end - start)
                self._on_heartbeat(worker.role, message)
                self._send_due()  # requests that the target had no room for
                if not message.has_peer and message.until > self._connected_at:
                    self._connect_workers()
            case Loading():
                self._on_loading(worker.role, message.what, message.fraction)

    def on_worker_loaded(self, worker: WorkerSupervisor, loaded: Loaded) -> None:
        """A worker has loaded; all of them get their KV budgets once the last one has."""
        try:
            for role, num_tokens in self._budgets.on_loaded(worker.role, loaded.memory).items():
                self._workers[role].grant(num_tokens)
        except ConfigError as error:
            self.on_worker_dead(worker, error.message)

    def on_worker_ready(self, worker: WorkerSupervisor, ready: Ready) -> None:
        """A worker is ready (again): send it the requests in flight, and connect the two workers to each other."""
        if worker.role in self._ready:
            self._metrics.worker_restarts.labels(worker.role).inc()
        self._ready[worker.role] = ready
        if worker.role == "target" and self._lost_at is not None:
            self._outage_s += time.monotonic() - self._lost_at
            self._lost_at = None
        if len(self._ready) == len(self._workers):
            self._open()
        if worker.role == "draft":
            for state in self._table:
                self._send_to_draft(state)
        self._send_due()
        self._connect_workers()

    def on_worker_lost(self, worker: WorkerSupervisor) -> bool:
        """The worker will restart; requests wait for a target, but not for a draft. True if a request is to blame."""
        logger.warning("%s worker lost with %d requests in flight", worker.role, len(self._table))
        # Until the next worker reports: one that is never restarted would look busy and full for ever.
        self._metrics.worker_idle_ratio.labels(worker.role).set(1)
        self._metrics.kv_cache_usage_perc.labels(worker.role).set(0)
        if worker.role == "draft":
            self._table.draft_lost()
            return False
        self._lost_at = time.monotonic() if self._lost_at is None else self._lost_at
        culprit = self._table.target_lost()
        if culprit is not None:
            logger.error(
                "request %s is refused: the target worker ended again at the same point of this request", culprit
            )
            self.on_worker_message(worker, Rejected(request_id=culprit, message="the request ends the model's process"))
        return culprit is not None

    def on_worker_dead(self, worker: WorkerSupervisor, reason: str) -> None:
        """The worker cannot be restarted; without a target, all requests fail."""
        if not self._started.done():
            self._started.set_exception(ConfigError(reason))
        if worker.role == "target":
            self._table.fail_all(EngineDead(reason))

    def _connect_workers(self) -> None:
        """Give both workers the ends of a new channel."""
        target, draft = self._workers["target"], self._workers.get("draft")
        if draft is None or {target.state, draft.state} != {WorkerState.READY}:
            return
        towers = [self._ready[role].tower for role in ("target", "draft")]
        shares_tower = None not in towers and towers[0] == towers[1]
        shares_gpu = share_gpu(self._ready["target"].device, self._ready["draft"].device)
        self._connected_at = time.monotonic()
        for worker, other, end in zip((draft, target), (target, draft), Channel.pair(), strict=True):
            about = Peer(pid=other.pid, shares_tower=shares_tower, shares_gpu=shares_gpu)
            worker.send(about, (end.fileno(),))
            end.close()

    def _open(self) -> None:
        """All workers are ready for the first time."""
        if self._started.done():
            return
        if not self._ready["target"].is_batch_invariant:
            logger.warning("this device is not batch-invariant: speculation may change text at near-ties")
        try:
            files = {role: ready.tokenizer_file for role, ready in self._ready.items()}
            if "draft" in files:  # of a hub id, the files may not have been there before
                require_one_vocabulary(files)
            self._tokenizer = Tokenizer.from_file(files["target"])
            # Some files keep the settings of a training's batches, which transformers does not use either.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._info = engine_info(self._config, self._ready)
        except ConfigError as error:
            self._started.set_exception(error)
        else:
            self._started.set_result(None)
