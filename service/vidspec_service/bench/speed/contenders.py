"""Prompts and contenders: what is asked, and what answers it in one mode and times its tokens."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from vidspec_models.bundled import TEST_SEEDS, questions, sample_scene
from vidspec_models.spec import ModelSpec
from vidspec_models.synthetic.recipe import prompt_text
from vidspec_service.bench.common.child import Child
from vidspec_service.bench.common.samples import Sample, Turn, ask_engine
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, about_video, scene_video
from vidspec_service.bench.speed.costs import WORKER
from vidspec_service.bench.speed.options import Mode, SpeedOptions, Task
from vidspec_service.bench.speed.worker import StockLoad, StockReply, StockRequest
from vidspec_service.engine.client import EngineClient
from vidspec_service.engine.payload import write_payload
from vidspec_service.engine.types import GenerationRequest, VideoInput
from vidspec_service.errors import GenerationFailed

_STOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """One question about one clip."""

    index: int
    text: str
    video: VideoInput

    def request(self, mode: Mode, turn: Turn, options: SpeedOptions) -> GenerationRequest:
        """The same for every mode but for how it speculates; each prompt has a seed of its own."""
        return GenerationRequest(
            request_id=turn.request_id,
            messages=about_video(self.text),
            videos=(self.video,),
            max_tokens=options.max_tokens,
            sampling=replace(options.sampling, seed=options.sampling.seed + self.index),
            speculation=mode.speculation,
        )


def make_prompts(task: Task, indices: range) -> Iterator[BenchPrompt]:
    """Prompt i is about the i-th test scene; questions go round the types that apply to it."""
    for index in indices:
        if task is Task.SYNTHETIC:
            yield BenchPrompt(index=index, text=prompt_text(index), video=_blank_video())
        else:
            seed = TEST_SEEDS[index]
            yield BenchPrompt(index=index, text=_text(task, index, seed), video=scene_video(seed))


def _text(task: Task, index: int, seed: int) -> str:
    if task is Task.CAPTION or (task is Task.MIXED and index % 2 == 0):
        return CAPTION_PROMPT
    asked = questions(sample_scene(seed))
    return asked[index % len(asked)].text


def _blank_video() -> VideoInput:
    """What a model without a vision tower does not look at."""
    return VideoInput(
        frames=np.zeros((1, 8, 8, 3), np.uint8),
        timestamps_s=(0.0,),
        source_indices=(0,),
        source_fps=1.0,
        source_num_frames=1,
        duration_s=1.0,
    )


class Contender(Protocol):
    """Answers; its processes sleep between answers."""

    def pids(self) -> list[int]:
        """Its processes."""
        ...

    async def answer(self, turn: Turn, request: GenerationRequest) -> Sample:
        """Generate once."""
        ...


class EngineContender:
    """Our engine; the mode is part of the request."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def pids(self) -> list[int]:
        return [pid for pid in self._engine.worker_pids().values() if pid is not None]

    async def answer(self, turn: Turn, request: GenerationRequest) -> Sample:
        return await ask_engine(self._engine, turn, request)


class StockContender:
    """Stock transformers in a process of its own, one request at a time: `generate` has no continuous batching."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        self._load = StockLoad(spec=spec, threads=threads)
        self._child: Child | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> StockContender:
        self._child = await asyncio.to_thread(Child, WORKER, _STOCK_TIMEOUT_S)
        await asyncio.to_thread(self._child.ask, self._load, StockReply)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._child is not None:
            await asyncio.to_thread(self._child.close)
            self._child = None

    def pids(self) -> list[int]:
        return [self._child.pid] if self._child is not None else []

    async def answer(self, turn: Turn, request: GenerationRequest) -> Sample:
        """Times are those of the tokens in the child: its way here is not `generate`'s fault."""
        submitted = time.monotonic()
        async with self._lock:
            reply = await asyncio.to_thread(self._ask, request)
        return turn.sample(reply.ids, reply.prompt_tokens, submitted, reply.token_times)

    def _ask(self, request: GenerationRequest) -> StockReply:
        if self._child is None:
            raise GenerationFailed("the stock process was not started")
        payload = write_payload(request.messages, request.videos)
        try:
            assert request.max_tokens is not None, "stock `generate` has no limit of its own"
            asked = StockRequest(max_tokens=request.max_tokens, sampling=request.sampling)
            return self._child.ask(asked, StockReply, (payload,))
        finally:
            os.close(payload)
