"""LocalEngine: owns the pair of workers: starts, introduces and ends them, gives a new one what the last one had."""

from __future__ import annotations

import asyncio
import logging
import time

from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.client import EngineClient, OnHeartbeat, OnLoading, ignore
from vidspec_service.engine.frontend.interface import EngineStatus, WorkerState
from vidspec_service.engine.frontend.kv_shares import KVShares
from vidspec_service.engine.frontend.launcher import WorkerLauncher
from vidspec_service.engine.frontend.supervisor import Worker
from vidspec_service.engine.frontend.workers import common_tokenizer, configure_messages, engine_info
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Heartbeat, Loaded, Message, Peer, Ready, Rejected
from vidspec_service.errors import ConfigError, EngineDead
from vidspec_service.telemetry import EngineMetrics

logger = logging.getLogger(__name__)


class LocalEngine(EngineClient):
    """Implements `Engine`. Use as `async with LocalEngine(...)`: entering waits until the workers are ready."""

    _workers: dict[str, Worker]
    _ready: dict[str, Ready]
    _started: asyncio.Future[None]
    _shares: KVShares

    def __init__(
        self,
        config: EngineConfig,
        metrics: EngineMetrics,
        on_heartbeat: OnHeartbeat = ignore,
        on_loading: OnLoading = ignore,
        launcher: WorkerLauncher | None = None,
    ) -> None:
        """A `launcher` that is given may start the workers of other engines, too; it stays open."""
        super().__init__(config, metrics, on_heartbeat, on_loading)
        self._launcher = launcher or WorkerLauncher()
        self._owns_launcher = launcher is None
        self._lost_at: float | None = None  # the target, if there is none at present
        self._outage_s = 0.0  # of those before
        self._introduced_at = 0.0

    async def __aenter__(self) -> LocalEngine:
        self._workers, self._ready = {}, {}
        self._shares = KVShares(self._config, self._workers)
        self._started = asyncio.get_running_loop().create_future()
        for configure in configure_messages(self._config):
            worker = self._workers[configure.role] = Worker(configure, self._launcher, self)
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
                f"workers were not ready within {limit:g} s; slow devices and downloads need more: --start-timeout-s"
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

    def status(self) -> EngineStatus:
        lost_s = 0.0 if self._lost_at is None else time.monotonic() - self._lost_at
        running = sum(state.is_accepted for state in self._table)
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

    def worker_loaded(self, worker: Worker, loaded: Loaded) -> None:
        """It is told how much of its devices it may fill once all workers that share them have loaded."""
        try:
            self._shares.measured(worker.role, loaded.memory)
        except ConfigError as error:
            self.worker_dead(worker, error.message)

    def worker_ready(self, worker: Worker, ready: Ready) -> None:
        """A worker (again) takes work: introduce the two to each other, hand it what is in flight."""
        if worker.role in self._ready:
            self._metrics.worker_restarts.labels(worker.role).inc()
        self._ready[worker.role] = ready
        self._shares.ready(worker.role)
        if worker.role == "target" and self._lost_at is not None:
            self._outage_s += time.monotonic() - self._lost_at
            self._lost_at = None
        if len(self._ready) == len(self._workers):
            self._open()
        if worker.role == "draft":
            for state in self._table:
                self._give_draft(state)
        self._hand_over()
        self._introduce()

    def worker_lost(self, worker: Worker) -> bool:
        """It will be started again; requests wait (target) or go on alone (draft). True if a request is to blame."""
        logger.warning("%s worker lost with %d requests in flight", worker.role, len(self._table))
        if worker.role == "draft":
            self._table.draft_lost()
            return False
        self._lost_at = time.monotonic() if self._lost_at is None else self._lost_at
        culprit = self._table.target_lost()
        if culprit is not None:
            logger.error("request %s is refused: the target ended on its way to the same place again", culprit)
            self.worker_said(worker, Rejected(request_id=culprit, message="it ends the model's process"))
        return culprit is not None

    def worker_dead(self, worker: Worker, reason: str) -> None:
        """It cannot be brought back."""
        if not self._started.done():
            self._started.set_exception(ConfigError(reason))
        if worker.role == "target":
            self._table.fail_all(EngineDead(reason))

    def worker_said(self, worker: Worker, message: Message) -> None:
        """See `EngineClient`. Workers that have lost each other, since one did not read, are introduced again."""
        super().worker_said(worker, message)
        if isinstance(message, Heartbeat) and not message.has_peer and message.until > self._introduced_at:
            self._introduce()

    def _introduce(self) -> None:
        """Give both workers the ends of a new channel."""
        target, draft = self._workers["target"], self._workers.get("draft")
        if draft is None or {target.state, draft.state} != {WorkerState.READY}:
            return
        towers = [self._ready[role].tower for role in ("target", "draft")]
        shares_tower = None not in towers and towers[0] == towers[1]
        self._introduced_at = time.monotonic()
        for worker, end in zip((draft, target), Channel.pair(), strict=True):
            worker.send(Peer(shares_tower=shares_tower), (end.fileno(),))
            end.close()

    def _open(self) -> None:
        """All workers are there for the first time."""
        if self._started.done():
            return
        if not self._ready["target"].is_batch_invariant:
            logger.warning("this device is not batch-invariant: speculation may change text at near-ties")
        try:
            self._tokenizer = common_tokenizer(self._ready)
            self._info = engine_info(self._config, self._ready)
        except ConfigError as error:
            self._started.set_exception(error)
        else:
            self._started.set_result(None)
