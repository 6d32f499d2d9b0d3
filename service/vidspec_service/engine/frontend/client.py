"""EngineClient: a request on the API's side of the workers: submitted, its events routed back to it, cancelled.

Runs on one event loop: worker channels are read by loop callbacks, so nothing here needs a lock. Every request's
payload and committed tokens are kept until it ends; that is what lets a restarted worker take it up again. Who starts
the workers and brings them back is `LocalEngine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from tokenizers import Tokenizer

from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.interface import EngineInfo, WorkerState
from vidspec_service.engine.frontend.output_processor import OutputProcessor
from vidspec_service.engine.frontend.request_table import RequestMessage, RequestState, RequestTable
from vidspec_service.engine.frontend.supervisor import Worker
from vidspec_service.engine.frontend.token_ids import with_token_ids
from vidspec_service.engine.ipc.messages import Ended, Heartbeat, Loading, Message, Rejected, Tokens
from vidspec_service.engine.ipc.payload import payload_of
from vidspec_service.engine.types import Accepted, Activity, DraftView, Finished, GenerationEvent
from vidspec_service.errors import EngineDead, EngineError
from vidspec_service.telemetry import EngineMetrics

Heard = RequestMessage | EngineError
OnHeartbeat = Callable[[str, Heartbeat], None]  # role, what its worker did
OnLoading = Callable[[str, str, float | None], None]  # role, what its worker does, the share that is done


def ignore(*_: object) -> None:
    """For whoever does not want to be told."""


class EngineClient:
    """What a request needs of `Engine`, over workers that somebody else keeps alive."""

    def __init__(
        self,
        config: EngineConfig,
        metrics: EngineMetrics,
        on_heartbeat: OnHeartbeat,
        on_loading: OnLoading,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._on_heartbeat = on_heartbeat
        self._on_loading = on_loading
        self._table = RequestTable(config.max_running_requests)
        self._workers: Mapping[str, Worker] = {}
        self._tokenizer: Tokenizer | None = None  # both are known once the workers are ready
        self._info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("the engine is not ready")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Engine`."""
        if self._tokenizer is None:
            raise EngineDead("the engine is not ready")
        return self._tokenizer

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `Engine.generate`."""
        if self._tokenizer is None or self._workers["target"].state is WorkerState.DEAD:
            raise EngineDead("the target worker is gone and cannot be brought back")
        request = replace(request, speculation=self._mode(request))
        if request.names_tokens:
            request = await asyncio.to_thread(with_token_ids, request, self._tokenizer)
        payload = await payload_of(request)
        request = replace(request, videos=())  # the frames are in shared memory
        messages: asyncio.Queue[Heard] = asyncio.Queue()
        states = [RequestState(request.choice(index), payload, index, messages) for index in range(request.n)]
        running = {each.request_id: OutputProcessor(self._tokenizer, each.request, each.choice) for each in states}
        with self._table.registered(*states):
            try:
                for state in states:
                    self._give_draft(state)  # first, so that it knows a request when the target's first verdict comes
                self._hand_over()
                while running:
                    for group in together(await all_of(messages)):
                        request_id = group[0].request_id
                        if (output := running.get(request_id)) is None:
                            continue  # a stop string came before this
                        for event in output.process(group):
                            yield event
                            if isinstance(event, Finished):
                                del running[request_id]
                                self._forget(request_id)
            finally:
                for state in states:
                    self._forget(state.request_id)

    def worker_said(self, worker: Worker, message: Message) -> None:
        """Route an event to its request."""
        match message:
            case Accepted() | Rejected() | Tokens() | Ended() | Activity() | DraftView():
                if self._table.route(message):
                    self._observe(message)
                    self._hand_over()
            case Heartbeat():
                idle = max(0.0, 1 - message.busy_s / message.elapsed_s)
                self._metrics.worker_idle_ratio.labels(worker.role).set(idle)
                self._metrics.kv_cache_usage_perc.labels(worker.role).set(message.cache_usage)
                for start, end, _ in message.forwards:
                    self._metrics.forward[worker.role].observe(end - start)
                self._on_heartbeat(worker.role, message)
                self._hand_over()  # what it had no room for
            case Loading():
                self._on_loading(worker.role, message.what, message.fraction)

    def _forget(self, request_id: str) -> None:
        """Nobody waits for what it may still have to say."""
        if self._table.remove(request_id):
            for worker in self._workers.values():
                worker.cancel(request_id)
            self._hand_over()

    def _give_draft(self, state: RequestState) -> None:
        if state.wants_draft and "draft" in self._workers:
            state.give(self._workers["draft"].send)

    def _hand_over(self) -> None:
        """Give the target all that it may have now; what it cannot take waits for it, or for the next one."""
        send = self._workers["target"].send
        while (state := self._table.next_due()) is not None and state.give(send):
            self._table.mark_given(state)

    def _observe(self, message: RequestMessage) -> None:
        if isinstance(message, Tokens):
            self._metrics.spec_decode_rollbacks.inc(message.num_rollbacks)
            self._metrics.spec_decode_wasted_draft_tokens.inc(message.num_wasted)
            if message.num_judged:
                count_verified(
                    self._metrics, num_draft_tokens=message.num_judged, num_accepted_tokens=message.num_accepted
                )
        elif isinstance(message, Ended | Rejected) and "draft" in self._workers:
            self._workers["draft"].cancel(message.request_id)

    def _mode(self, request: GenerationRequest) -> SpeculationMode:
        if "draft" not in self._workers and not self._config.has_ngram_draft:
            return SpeculationMode.OFF
        return self._config.speculation if request.speculation is SpeculationMode.AUTO else request.speculation


async def all_of(messages: asyncio.Queue[Heard]) -> list[Heard]:
    """Everything that has come; waits for the first."""
    come = [await messages.get()]
    while not messages.empty():
        come.append(messages.get_nowait())
    return come


def together(come: Sequence[Heard]) -> Iterator[list[RequestMessage]]:
    """Tokens of one answer that follow each other in one group, since an event costs the same whatever it tells.

    Raises an error that has come, after all that came before it.
    """
    for _, group in groupby(come, lambda each: each.request_id if isinstance(each, Tokens) else id(each)):
        told: list[RequestMessage] = []
        for each in group:
            if isinstance(each, EngineError):
                raise each
            told.append(each)
        yield told


def count_verified(metrics: EngineMetrics, *, num_draft_tokens: int, num_accepted_tokens: int) -> None:
    """One verification that judged at least one draft token; `SpeculationStats` defines judged and accepted."""
    metrics.spec_decode_num_drafts.inc()
    metrics.spec_decode_num_draft_tokens.inc(num_draft_tokens)
    metrics.spec_decode_num_accepted_tokens.inc(num_accepted_tokens)
    for position in range(num_accepted_tokens):
        metrics.spec_decode_num_accepted_tokens_per_pos.labels(str(position)).inc()
