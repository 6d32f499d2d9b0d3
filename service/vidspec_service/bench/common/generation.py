"""Send a benchmark's requests to our engine or to stock transformers (in a child process); each answer is a Sample."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import GenerationRequest
from vidspec_service.bench.common.child import Child
from vidspec_service.bench.common.samples import Sample
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.interface import Engine
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.types import Finished, PromptReady, SpeculationStats, TextDelta
from vidspec_service.telemetry import Metrics

if TYPE_CHECKING:
    from vidspec_models.reference.stock import StockAnswer


def new_engine(config: EngineConfig, **options: Any) -> LocalEngine:
    """An engine that the caller enters as a context manager. Its metrics go to a registry that nothing reads."""
    return LocalEngine(config, Metrics(CollectorRegistry()), **options)


async def generate_sample(engine: Engine, request: GenerationRequest) -> Sample:
    """Answer one request. The times are when committed tokens arrived in this process."""
    ids: list[int] = []
    times: list[float] = []
    prompt_tokens, num_first, stats = 0, 0, SpeculationStats()
    submitted = time.monotonic()
    async for event in engine.generate(request):
        match event:
            case PromptReady():
                prompt_tokens = event.prompt_tokens
            case TextDelta() if event.ids:
                times.append(time.monotonic())
                num_first = num_first or len(event.ids)
                ids += event.ids
            case Finished():
                stats = event.speculation
    return Sample(
        ids=tuple(ids),
        prompt_tokens=prompt_tokens,
        submitted=submitted,
        times=tuple(times),
        num_first=num_first,
        speculation=stats,
    )


class StockModel:
    """Stock transformers. Create it in the process that runs the model, because it imports torch."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        import torch

        from vidspec_models.reference.stock import load_stock

        torch.set_num_threads(threads)
        self._generator = load_stock(spec)

    def answer(self, request: GenerationRequest) -> StockAnswer:
        """Generate one answer; the request must have `max_tokens`."""
        assert request.max_tokens is not None, "stock `generate` has no limit of its own"
        return self._generator.answer(request.turns, request.videos, request.max_tokens, request.sampling)

    def prefill_s(self, embeddings: NDArray[np.float32]) -> float:
        """Seconds to prefill a prompt's embeddings [P, hidden size]."""
        return self._generator.prefill_s(embeddings)


async def generate_stock_sample(child: Child[StockModel], request: GenerationRequest) -> Sample:
    """Answer one request, after those before it: `generate` cannot batch, so waiting counts as time to the first token.

    Token times are taken in the child: the transfer to this process is not `generate`'s cost.
    """
    submitted = time.monotonic()
    found = await asyncio.to_thread(child.call, StockModel.answer, request)
    return Sample(ids=found.ids, prompt_tokens=found.prompt_tokens, submitted=submitted, times=found.token_times)
