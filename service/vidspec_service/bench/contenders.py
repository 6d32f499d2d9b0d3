"""Contenders: what answers a prompt in one mode and times its tokens. Engines serve several modes, the peer one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from vidspec_models.spec import ModelSpec
from vidspec_service.bench.child import Child
from vidspec_service.bench.options import Mode, SpeedOptions
from vidspec_service.bench.prompts import BenchPrompt
from vidspec_service.bench.samples import Sample
from vidspec_service.bench.stock_worker import StockLoad, StockReply, StockRequest
from vidspec_service.engine.client import EngineClient
from vidspec_service.engine.payload import write_payload
from vidspec_service.engine.types import (
    Finished,
    GenerationRequest,
    SamplingParams,
    SpeculationStats,
    Started,
    TextDelta,
)
from vidspec_service.errors import GenerationFailed

_STOCK_WORKER = "vidspec_service.bench.stock_worker"
_STOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt's turn in one mode."""

    mode: Mode
    group: int
    prompt: BenchPrompt

    @property
    def request_id(self) -> str:
        return f"{self.mode}-{self.group}-{self.prompt.index}"


class Contender(Protocol):
    """Answers; its processes sleep between answers."""

    def pids(self) -> list[int]:
        """Its processes."""
        ...

    async def answer(self, turn: Turn, options: SpeedOptions) -> Sample:
        """Generate once."""
        ...


def sampling_of(options: SpeedOptions, prompt: BenchPrompt) -> SamplingParams:
    """The same for every mode; each prompt has a seed of its own."""
    return replace(options.sampling, seed=options.sampling.seed + prompt.index)


class EngineContender:
    """Our engine; the mode is part of the request."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def pids(self) -> list[int]:
        return [pid for pid in self._engine.worker_pids().values() if pid is not None]

    async def answer(self, turn: Turn, options: SpeedOptions) -> Sample:
        """Times are those of the committed tokens' arrival in this process."""
        request = GenerationRequest(
            request_id=turn.request_id,
            messages=turn.prompt.messages,
            videos=(turn.prompt.video,),
            max_tokens=options.max_tokens,
            sampling=sampling_of(options, turn.prompt),
            speculation=turn.mode.speculation,
        )
        ids: list[int] = []
        times: list[float] = []
        prompt_tokens, stats = 0, SpeculationStats()
        submitted = time.monotonic()
        async for event in self._engine.generate(request):
            match event:
                case Started():
                    prompt_tokens = event.prompt_tokens
                case TextDelta() if event.ids:
                    times.append(time.monotonic())
                    ids += event.ids
                case Finished():
                    stats = event.speculation
        return _sample(turn, ids, prompt_tokens, submitted, times, stats)


class StockContender:
    """Stock transformers in a process of its own, one request at a time: `generate` has no continuous batching."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        self._load = StockLoad(spec=spec, threads=threads)
        self._child: Child | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> StockContender:
        self._child = await asyncio.to_thread(Child, _STOCK_WORKER, _STOCK_TIMEOUT_S)
        await asyncio.to_thread(self._child.ask, self._load, StockReply)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._child is not None:
            await asyncio.to_thread(self._child.close)
            self._child = None

    def pids(self) -> list[int]:
        return [self._child.pid] if self._child is not None else []

    async def answer(self, turn: Turn, options: SpeedOptions) -> Sample:
        """Times are those of the tokens in the child: its way here is not `generate`'s fault."""
        law = sampling_of(options, turn.prompt)
        request = StockRequest(
            max_tokens=options.max_tokens,
            temperature=law.temperature,
            top_p=law.top_p,
            top_k=law.top_k,
            seed=law.seed,
        )
        submitted = time.monotonic()
        async with self._lock:
            reply = await asyncio.to_thread(self._ask, request, turn.prompt)
        return _sample(turn, reply.ids, reply.prompt_tokens, submitted, reply.token_times, SpeculationStats())

    def _ask(self, request: StockRequest, prompt: BenchPrompt) -> StockReply:
        if self._child is None:
            raise GenerationFailed("the stock process was not started")
        payload = write_payload(prompt.messages, (prompt.video,))
        try:
            return self._child.ask(request, StockReply, (payload,))
        finally:
            os.close(payload)


def _sample(
    turn: Turn,
    ids: Sequence[int],
    prompt_tokens: int,
    submitted: float,
    times: Sequence[float],
    stats: SpeculationStats,
) -> Sample:
    if not times:
        raise GenerationFailed(f"no token came for {turn.request_id}")
    return Sample(
        mode=turn.mode,
        group=turn.group,
        prompt=turn.prompt.index,
        ids=tuple(ids),
        prompt_tokens=prompt_tokens,
        submitted=submitted,
        first=times[0],
        last=times[-1],
        speculation=stats,
    )
