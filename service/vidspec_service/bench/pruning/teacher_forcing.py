"""Acceptance rate without an engine: the draft reads the target's greedy text in one forward (teacher forcing).

At every position its choice is compared with the target's. Models, caches, decoders and token choice are those of the
workers, so the acceptance is exact and needs no schedule.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.loading.load_model import load_model
from vidspec_models.preservation.selection import CellSelector
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.preservation.text_queries import SoftmaxOver, TextQueries
from vidspec_models.prompt import Prompt, grid_checksum, pruned
from vidspec_models.reference.measure import greedy_tokens
from vidspec_models.request import SamplingParams
from vidspec_models.sampling import CoupledSampler
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.bench.common.environment import threads_of
from vidspec_service.bench.common.scenes import about_video
from vidspec_service.bench.pruning.options import BASELINE, ClipPrompt, PruningConfig, PruningOptions, PruningTask
from vidspec_service.engine.config import EngineConfig, prefill_rows
from vidspec_service.errors import ConfigError

_ENCODED_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedAnswer:
    """The draft on one prompt in one configuration. `matches[i]`: at position i it chose the target's token."""

    config: PruningConfig
    clip: int
    task: PruningTask
    matches: tuple[bool, ...]
    video_tokens: int
    prefill_s: float
    selection_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAnswer:
    """The target's own text for one prompt, and the relevance scores that strategies need."""

    prompt: Prompt
    ids: tuple[int, ...]
    relevance: dict[SoftmaxOver, Tensor | None]  # [video rows]


class LoadedPair:
    """Target and draft in this process, each with the number of threads that its worker would have.

    Each caches the features of the current clip, about which a dozen questions are asked.
    """

    def __init__(self, pair: EngineConfig) -> None:
        if pair.draft is None or pair.has_ngram_draft:
            raise ConfigError("bench pruning needs a draft model: name one with --draft-model")
        self.target = load_model(pair.target.spec("target"))
        self.draft = load_model(pair.draft.spec("draft"))
        self.threads = threads_of(pair)
        self.chunk = prefill_rows(pair, self.target.decoder.geometry.device.type, self.threads["target"])
        self._encoded = {role: EncoderCache(_ENCODED_BYTES) for role in ("target", "draft")}

    def run_as(self, role: str) -> VideoLM:
        """The model of a role, after giving this process that worker's number of threads."""
        torch.set_num_threads(self.threads[role])
        return self.target if role == "target" else self.draft

    def prompt(self, role: str, clip_prompt: ClipPrompt) -> Prompt:
        """The unpruned prompt of the model with this role."""
        turns = about_video(clip_prompt.text)
        return self.run_as(role).prepare(turns, (clip_prompt.video,), self._encoded[role])


def pruning_configs(options: PruningOptions) -> Iterator[PruningConfig]:
    """All configurations to measure, the baseline first. At ratio 0, every strategy equals the baseline."""
    yield PruningConfig(BASELINE, 0.0)
    for strategy in options.strategies:
        yield from (PruningConfig(strategy, ratio) for ratio in options.ratios_of(strategy) if ratio > 0)


def laws_of(configs: Sequence[PruningConfig]) -> list[SoftmaxOver]:
    """The relevance laws that these configurations need, without duplicates."""
    laws = (STRATEGIES[config.strategy].relevance for config in configs)
    return list(dict.fromkeys(law for law in laws if law is not None))


def target_answer(
    models: LoadedPair, clip_prompt: ClipPrompt, laws: Sequence[SoftmaxOver], max_tokens: int
) -> TargetAnswer:
    """Let the target answer the prompt, and record the relevance scores for `laws`."""
    target = models.run_as("target")
    prompt = models.prompt("target", clip_prompt)
    prefilled = prefill(target, prompt, models.chunk, max_tokens, is_observed=bool(laws))
    relevance = {law: prefilled.relevance(law) for law in laws}
    ids = tuple(greedy_tokens(target, prompt, prefilled.cache, prefilled.logits, max_tokens))
    return TargetAnswer(prompt=prompt, ids=ids, relevance=relevance)


def teacher_force(
    models: LoadedPair, clip_prompt: ClipPrompt, answer: TargetAnswer, configs: Sequence[PruningConfig], seed: int
) -> Iterator[ForcedAnswer]:
    """In every configuration, prefill the draft with the pruned prompt and compare it along the target's text."""
    draft = models.run_as("draft")
    full_prompt = models.prompt("draft", clip_prompt)
    for config in configs:
        started = time.perf_counter()
        kept = kept_rows(config, full_prompt, answer, seed + clip_prompt.clip)
        prompt = pruned(full_prompt, kept)
        selection_s = time.perf_counter() - started
        prefilled = prefill(draft, prompt, models.chunk, len(answer.ids))
        yield ForcedAnswer(
            config=config,
            clip=clip_prompt.clip,
            task=clip_prompt.task,
            matches=matches(draft, prompt, prefilled, answer.ids),
            video_tokens=len(kept),
            prefill_s=prefilled.seconds,
            selection_s=selection_s,
        )


def kept_rows(config: PruningConfig, full_prompt: Prompt, answer: TargetAnswer, seed: int) -> Tensor:
    """Rows of the draft's unpruned prompt that are kept; relevance needs the same grid in both models."""
    strategy = STRATEGIES[config.strategy]
    is_same_grid = grid_checksum(full_prompt) == grid_checksum(answer.prompt)
    relevance = answer.relevance.get(strategy.relevance) if strategy.relevance and is_same_grid else None
    return CellSelector(strategy, config.prune_ratio, full_prompt, seed).kept(relevance)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefilledPrompt:
    """A prompt in a cache."""

    cache: KVCache
    logits: Tensor  # [V] after the prompt
    seconds: float
    queries: TextQueries | None  # None if they were not recorded

    def relevance(self, law: SoftmaxOver) -> Tensor | None:
        """Relevance of the video rows to the text."""
        assert self.queries is not None, "prefilled without an observer"
        return self.queries.relevance(self.cache, law)


def prefill(model: VideoLM, prompt: Prompt, chunk: int, room: int, *, is_observed: bool = False) -> PrefilledPrompt:
    """Prefill in chunks as a worker does, with `room` rows for an answer; `is_observed` records the text's queries."""
    geometry = model.decoder.geometry
    cache = KVCache(geometry, prompt.num_tokens + room)
    queries = TextQueries(prompt, geometry, model.decoder.scale) if is_observed else None
    logits: Tensor | None = None
    started = time.perf_counter()
    while logits is None:
        num_rows = min(chunk, prompt.num_tokens - cache.length)
        observer = None if queries is None else queries.observer(cache.length, num_rows)
        logits = model.prefill(prompt, cache, chunk, observer)
    if logits.is_cuda:  # GPU kernels run asynchronously: wait for them before reading the clock
        torch.cuda.synchronize(logits.device)
    return PrefilledPrompt(cache=cache, logits=logits, seconds=time.perf_counter() - started, queries=queries)


def matches(model: VideoLM, prompt: Prompt, prefilled: PrefilledPrompt, ids: Sequence[int]) -> tuple[bool, ...]:
    """For each token of `ids`, whether the model, given all before it, chooses the same. Restores the cache."""
    sampler, cache = CoupledSampler(SamplingParams()), prefilled.cache
    scores = [prefilled.logits[None]]
    if len(ids) > 1:
        scores += model.step([StepRows(cache=cache, ids=ids[:-1], position=prompt.next_position)])
        cache.truncate(prompt.num_tokens)
    chosen = sampler.sample(torch.cat(scores), [])
    return tuple(mine == theirs for mine, theirs in zip(chosen, ids, strict=True))


def count_accepted(matches: Sequence[bool], window: int) -> tuple[int, int]:
    """Accepted proposals and verifications when `window` tokens are proposed at a time (serial schedule).

    A verification commits the accepted tokens and one more, the target's own.
    """
    at, accepted, verifications = 0, 0, 0
    while at < len(matches):
        proposed = matches[at : at + window]
        run = next((place for place, hit in enumerate(proposed) if not hit), len(proposed))
        accepted, verifications, at = accepted + run, verifications + 1, at + run + 1
    return accepted, verifications
