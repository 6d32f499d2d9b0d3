"""Prompts and contenders: what is asked, and what answers it in one mode and times its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from vidspec_models.bundled.questions import questions
from vidspec_models.bundled.scene import TEST_SEEDS, sample_scene
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import GenerationRequest, Video
from vidspec_models.synthetic.recipe import prompt_text
from vidspec_service.bench.common.child import Child
from vidspec_service.bench.common.samples import Sample, ask_engine
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, about_video, scene_video
from vidspec_service.bench.common.stock import StockModel
from vidspec_service.bench.speed.options import Mode, SpeedOptions, Task
from vidspec_service.engine.frontend.local_engine import LocalEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """One question about one clip."""

    index: int
    text: str
    video: Video

    def request(self, mode: Mode, group: int, options: SpeedOptions) -> GenerationRequest:
        """The same for every mode but for how it speculates; each prompt has a seed of its own."""
        return GenerationRequest(
            request_id=f"{mode}-{group}-{self.index}",
            turns=about_video(self.text),
            videos=(self.video,),
            max_tokens=options.max_tokens,
            sampling=replace(options.sampling, seed=options.sampling.seed + self.index),
            speculation=mode.speculation,
        )


def make_prompts(task: Task, indices: range) -> Iterator[BenchPrompt]:
    """Prompt i is about the i-th test scene; questions go round the types that apply. Random models see no scene."""
    for index in indices:
        yield BenchPrompt(index=index, text=_text(task, index), video=scene_video(TEST_SEEDS[index]))


def _text(task: Task, index: int) -> str:
    if task is Task.SYNTHETIC:
        return prompt_text(index)
    if task is Task.CAPTION or (task is Task.MIXED and index % 2 == 0):
        return CAPTION_PROMPT
    asked = questions(sample_scene(TEST_SEEDS[index]))
    return asked[index % len(asked)].text


@dataclass(frozen=True, slots=True)
class Contender:
    """Answers requests; its processes sleep between answers."""

    answer: Callable[[GenerationRequest], Awaitable[Sample]]
    pids: Callable[[], list[int]]


def engine_contender(engine: LocalEngine) -> Contender:
    """Our engine; the mode is part of the request."""
    return Contender(partial(ask_engine, engine), lambda: [pid for pid in engine.worker_pids().values() if pid])


@asynccontextmanager
async def stock_contender(spec: ModelSpec, threads: int) -> AsyncIterator[Contender]:
    """Stock transformers in a process of its own, one request at a time: `generate` has no continuous batching.

    Times are those of the tokens in that process: their way here is not `generate`'s fault.
    """
    child, lock = await asyncio.to_thread(Child, StockModel, spec, threads), asyncio.Lock()

    async def answer(request: GenerationRequest) -> Sample:
        submitted = time.monotonic()
        async with lock:
            found = await asyncio.to_thread(child.ask, StockModel.answer, request)
        return Sample(ids=found.ids, prompt_tokens=found.prompt_tokens, submitted=submitted, times=found.token_times)

    try:
        yield Contender(answer, lambda: [child.pid])
    finally:
        await asyncio.to_thread(child.close)
