"""The run of `bench peers`: each prompt goes through all runs, in rotating order, before the next prompt.

With each answer of ours and of transformers, the prefill of the language model is also timed alone, to compare it with
peers, which are given a prompt's embeddings and do no other work for it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import GenerationRequest, SpeculationMode
from vidspec_service.arguments import positive_int
from vidspec_service.bench.common.child import Child
from vidspec_service.bench.common.environment import target_only_config
from vidspec_service.bench.common.generation import StockModel, generate_sample, generate_stock_sample, new_engine
from vidspec_service.bench.common.loops import rounds
from vidspec_service.bench.common.options import choices, number, option
from vidspec_service.bench.common.report import OnProgress
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.common.scenes import scene_request
from vidspec_service.bench.peers.engines import ENGINES, GGML_BITS, PeerEngine
from vidspec_service.bench.peers.pair import CONTEXT, MAX_DRAFT_TOKENS, Peer, PeerAnswer, PromptEmbeddings, answer_with
from vidspec_service.engine.cgroups import num_cores
from vidspec_service.engine.config import ALONE_PREFILL_ROWS, EngineConfig
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.frontend.workers import worker_configs
from vidspec_service.errors import ConfigError

if TYPE_CHECKING:
    from vidspec_models.prompt import Prompt

STOCK = "transformers"
_WARM_UP_PROMPTS = 1
_BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOptions:
    """Captions of test clips, greedy."""

    num_prompts: int = number(12, "--prompts", "number of test clips")
    max_tokens: int = number(160, "--max-tokens", "maximum tokens per answer")
    dtypes: Sequence[str] = option(
        ("float32", "int8"), "--dtypes", "vidspec's data types (default float32 int8)", nargs="+", choices=list(_BITS)
    )
    peers: Sequence[str] = choices(ENGINES, "--peers", "engines to compare besides stock transformers (default: all)")
    weights: Sequence[str] = option(
        ("bf16", "q8_0"), "--weights", "the peers' weights, or their type of as many bits (default bf16 q8_0)",
        nargs="+", choices=list(GGML_BITS),
    )  # fmt: skip
    draft_tokens: Sequence[int] = option(
        (8, 12), "--draft-tokens", "draft tokens per verification of the peers (default 8 12)",
        nargs="+", type=positive_int, metavar="N",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPrompt:
    """A question about a clip, and the embeddings of both models' prompts."""

    index: int  # negative: for the warm-up
    request: GenerationRequest
    embeddings: PromptEmbeddings


@dataclass(slots=True, kw_only=True)
class EngineRun:
    """One engine with its weights, with or without speculation: a sample and a prefill time for each prompt."""

    name: str
    bits: int  # of its weights
    speculates: bool
    answer: Callable[[PeerPrompt], Awaitable[PeerAnswer]]  # the answer, and seconds of the language model's prefill
    samples: list[Sample] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)


def measure_peers(options: PeersOptions, pair: EngineConfig, on_progress: OnProgress) -> list[EngineRun]:
    """Raises ConfigError and EngineError."""
    if pair.draft is None or (pair.target.model, pair.draft.model) != ("bundled", "bundled"):
        raise ConfigError("bench peers works only with the bundled pair, whose language models the peers can load")
    for device in (pair.target.device, pair.draft.device):
        if device not in ("auto", "cpu"):
            raise ConfigError(f"bench peers compares engines on the CPU: leave out {device} as a device")
    if missing := sorted({name for peer in options.peers for name in ENGINES[peer].missing()}):
        raise ConfigError(f"{' and '.join(missing)} missing: pip install 'vidspec[peers]', or choose other --peers")
    if max(options.draft_tokens) > MAX_DRAFT_TOKENS:
        raise ConfigError(f"--draft-tokens may be at most {MAX_DRAFT_TOKENS}, not {max(options.draft_tokens)}")
    return asyncio.run(_measure(options, pair, on_progress))


async def _measure(options: PeersOptions, pair: EngineConfig, on_progress: OnProgress) -> list[EngineRun]:
    async with AsyncExitStack() as stack:
        on_progress("making the prompts", 0, 0)
        prompts, end_id = await asyncio.to_thread(_prompts, options, pair)
        most = CONTEXT - max(len(prompt.embeddings.target) for prompt in prompts) - max(options.draft_tokens)
        if options.max_tokens > most:
            raise ConfigError(f"--max-tokens may be at most {most} after these prompts, not {options.max_tokens}")
        runs = [await _stock(stack, pair, on_progress)]
        for dtype in options.dtypes:
            runs += await _ours(stack, pair, dtype, on_progress)
        embeddings = [prompt.embeddings for prompt in prompts]
        for engine in (ENGINES[name] for name in options.peers):
            for weights in engine.weights(options.weights):
                on_progress(f"loading {engine.name} in {weights}", 0, 0)
                child = stack.enter_context(
                    await asyncio.to_thread(Child, engine.make, weights, num_cores(), end_id, embeddings)
                )
                runs += _theirs(options, engine, weights, child)
        warm_up = itertools.product(prompts[:_WARM_UP_PROMPTS], runs)
        for prompt, each in itertools.chain(warm_up, rounds(prompts[_WARM_UP_PROMPTS:], runs)):
            on_progress(each.name, max(prompt.index, 0), options.num_prompts)
            sample, prefill_s = await each.answer(prompt)
            if prompt.index >= 0:
                each.samples.append(replace(sample, group=prompt.index))
                each.prefill_s.append(prefill_s)
        return runs


def _prompts(options: PeersOptions, pair: EngineConfig) -> tuple[list[PeerPrompt], int]:
    """The prompts, made by our own models in float32 in processes that end before any timing; and the end token."""
    indices = range(-_WARM_UP_PROMPTS, options.num_prompts)
    requests = [scene_request(f"prompt-{index}", index, options.max_tokens) for index in indices]
    embeddings = []
    for role, worker in worker_configs(pair).items():
        spec = replace(worker.spec(role), dtype="float32", device="cpu")
        with Child(VidspecModel, spec, num_cores()) as child:
            embeddings.append([child.call(VidspecModel.embeddings, request) for request in requests])
            end_id = child.call(VidspecModel.end_id)
    return [
        PeerPrompt(index=index, request=request, embeddings=PromptEmbeddings(index=place, target=target, draft=draft))
        for place, (index, request, target, draft) in enumerate(zip(indices, requests, *embeddings, strict=True))
    ], end_id


async def _stock(stack: AsyncExitStack, pair: EngineConfig, on_progress: OnProgress) -> EngineRun:
    on_progress("loading stock transformers", 0, 0)
    spec = replace(pair.target.spec("target"), dtype="float32", device="cpu")
    child = stack.enter_context(await asyncio.to_thread(Child, StockModel, spec, num_cores()))

    async def answer(prompt: PeerPrompt) -> PeerAnswer:
        sample = await generate_stock_sample(child, prompt.request)
        return sample, await asyncio.to_thread(child.call, StockModel.prefill_s, prompt.embeddings.target)

    return EngineRun(name=STOCK, bits=32, speculates=False, answer=answer)


async def _ours(stack: AsyncExitStack, pair: EngineConfig, dtype: str, on_progress: OnProgress) -> list[EngineRun]:
    assert pair.draft is not None
    target, draft = (replace(worker, dtype=dtype, device="cpu") for worker in (pair.target, pair.draft))
    typed = replace(pair, target=target, draft=draft)
    child = stack.enter_context(await asyncio.to_thread(Child, VidspecModel, target.spec("target"), num_cores()))
    chunk, found = pair.prefill_chunk or ALONE_PREFILL_ROWS, []  # the chunk of a prompt that runs alone
    for mode, config in ((SpeculationMode.OFF, target_only_config(typed)), (SpeculationMode.PARALLEL, typed)):
        name = f"vidspec {dtype}, {mode}"
        on_progress(f"loading {name}", 0, 0)
        engine = await stack.enter_async_context(new_engine(config))

        async def answer(prompt: PeerPrompt, engine: LocalEngine, mode: SpeculationMode) -> PeerAnswer:
            sample = await generate_sample(engine, replace(prompt.request, speculation=mode))
            return sample, await asyncio.to_thread(child.call, VidspecModel.prefill_s, prompt.request, chunk)

        bound, speculates = partial(answer, engine=engine, mode=mode), mode is SpeculationMode.PARALLEL
        found.append(EngineRun(name=name, bits=_BITS[dtype], speculates=speculates, answer=bound))
    return found


def _theirs(options: PeersOptions, engine: PeerEngine, weights: str, child: Child[Peer]) -> list[EngineRun]:
    async def answer(prompt: PeerPrompt, num_draft_tokens: int) -> PeerAnswer:
        return await asyncio.to_thread(child.call, answer_with, prompt.embeddings, options.max_tokens, num_draft_tokens)

    return [
        EngineRun(
            name=f"{engine.name} {weights}" + (f", {num_draft_tokens} ahead" if num_draft_tokens else ""),
            bits=engine.bits[weights],
            speculates=num_draft_tokens > 0,
            answer=partial(answer, num_draft_tokens=num_draft_tokens),
        )
        for num_draft_tokens in ([0] if engine.runs_alone else []) + list(options.draft_tokens)
    ]


class VidspecModel:
    """Our own model in a child process: makes prompts, and times their prefill without the vision tower."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        import torch

        from vidspec_models.loading.load_model import load_model

        torch.set_num_threads(threads)
        self._model = load_model(spec)
        self._prompts: dict[str, Prompt] = {}

    def end_id(self) -> int:
        """The token that ends an answer."""
        return min(self._model.stop_ids)

    def embeddings(self, request: GenerationRequest) -> NDArray[np.float32]:
        """Embeddings [P, hidden size] of the request's prompt, with the video's features merged in."""
        found: NDArray[np.float32] = self._prompt(request).embeddings.float().numpy()
        return found

    def prefill_s(self, request: GenerationRequest, chunk: int) -> float:
        """Seconds of the second prefill of its prompt: in the first, the tower's threads still wait for more work."""
        from vidspec_models.decoder.kv_cache import KVCache

        prompt, began = self._prompt(request), 0.0
        for _ in range(2):
            cache, began = KVCache(self._model.decoder.geometry, prompt.num_tokens), time.monotonic()
            while self._model.prefill(prompt, cache, chunk) is None:
                pass
        return time.monotonic() - began

    def _prompt(self, request: GenerationRequest) -> Prompt:
        if (prompt := self._prompts.get(request.request_id)) is None:
            prompt = self._prompts[request.request_id] = self._model.prepare(request.turns, request.videos)
        return prompt
