"""Acceptance rate without an engine: in one forward, the draft's choice at every position of the target's greedy text.

Models, caches, decoders and token choice are those of the workers, so the acceptance is exact and needs no schedule.
Every strategy is judged at every ratio on every prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.inputs import Prompt, grid_checksum, pruned
from vidspec_models.loading.load_model import load_model
from vidspec_models.preservation.selection import Selection
from vidspec_models.preservation.strategies import STRATEGIES
from vidspec_models.preservation.text_queries import RelevanceLaw, TextQueries
from vidspec_models.request import SamplingParams
from vidspec_models.sampling import CoupledSampler
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.bench.common.environment import spec_of, threads_of
from vidspec_service.bench.pruning.options import BASELINE, ClipPrompt, PruningOptions, Setting, Task
from vidspec_service.engine.config import EngineConfig, Preservation, prefill_rows
from vidspec_service.errors import ConfigError

_ENCODED_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One prompt under one setting; `hits[i]` tells whether the draft's choice at position i is the target's."""

    setting: Setting
    clip: int
    task: Task
    hits: tuple[bool, ...]
    video_tokens: int
    prefill_s: float
    selection_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The target's own text for one prompt, and the relevance scores that strategies need."""

    prompt: Prompt
    ids: tuple[int, ...]
    relevance: dict[RelevanceLaw, Tensor | None]  # [video rows]


class LoadedPair:
    """Target and draft in this process, each with the number of threads that its worker would have.

    Each caches the features of the current clip, about which a dozen questions are asked.
    """

    def __init__(self, pair: EngineConfig) -> None:
        if pair.draft is None:
            raise ConfigError("bench pruning needs a draft model: name one with --draft-model")
        self.target = load_model(spec_of(pair.target, "target"))
        self.draft = load_model(spec_of(pair.draft, "draft"))
        self.threads = threads_of(pair)
        self.chunk = prefill_rows(pair, self.target.decoder.geometry.device.type, self.threads["target"])
        self._encoded = {role: EncoderCache(_ENCODED_BYTES) for role in ("target", "draft")}

    def run_as(self, role: str) -> VideoLM:
        """The model of a role, after giving this process that worker's number of threads."""
        torch.set_num_threads(self.threads[role])
        return self.target if role == "target" else self.draft

    def prompt(self, role: str, asked: ClipPrompt) -> Prompt:
        """The unpruned prompt of the model with this role."""
        return self.run_as(role).prepare(asked.turns, (asked.video,), self._encoded[role])


def settings_of(options: PruningOptions) -> Iterator[Setting]:
    """All settings to measure, the baseline first. At ratio 0, every strategy equals the baseline."""
    yield Setting(BASELINE, 0.0)
    if Preservation.BLIND in options.strategies:
        yield Setting(Preservation.BLIND, 1.0)
    for strategy in options.strategies:
        if not STRATEGIES[strategy].ignores_ratio:
            yield from (Setting(strategy, ratio) for ratio in options.ratios if ratio > 0)


def laws_of(settings: Sequence[Setting]) -> list[RelevanceLaw]:
    """The relevance laws that the settings need, without duplicates."""
    laws = (STRATEGIES[setting.strategy].relevance for setting in settings)
    return list(dict.fromkeys(law for law in laws if law is not None))


def answered(models: LoadedPair, asked: ClipPrompt, laws: Sequence[RelevanceLaw], max_tokens: int) -> Answered:
    """Let the target answer the prompt, and record the relevance scores for `laws`."""
    target = models.run_as("target")
    prompt = models.prompt("target", asked)
    after = prefilled(target, prompt, models.chunk, max_tokens, laws)
    relevance = {law: queries.relevance(after.cache) for law, queries in after.queries.items()}
    return Answered(prompt=prompt, ids=greedy_answer(target, prompt, after, max_tokens), relevance=relevance)


def judged(
    models: LoadedPair, asked: ClipPrompt, answer: Answered, settings: Sequence[Setting], seed: int
) -> Iterator[Judged]:
    """Judge the draft under every setting: it prefills the pruned prompt and is compared along the target's text."""
    draft = models.run_as("draft")
    whole = models.prompt("draft", asked)
    for setting in settings:
        started = time.perf_counter()
        kept = kept_rows(setting, whole, answer, seed + asked.clip)
        prompt = pruned(whole, kept)
        selection_s = time.perf_counter() - started
        after = prefilled(draft, prompt, models.chunk, len(answer.ids))
        yield Judged(
            setting=setting,
            clip=asked.clip,
            task=asked.task,
            hits=matches(draft, prompt, after, answer.ids),
            video_tokens=len(kept),
            prefill_s=after.seconds,
            selection_s=selection_s,
        )


def kept_rows(setting: Setting, whole: Prompt, answer: Answered, seed: int) -> Tensor:
    """Rows of the draft's unpruned prompt that the setting keeps; relevance needs the same grid in both models."""
    strategy = STRATEGIES[setting.strategy]
    is_same_grid = grid_checksum(whole) == grid_checksum(answer.prompt)
    relevance = answer.relevance.get(strategy.relevance) if strategy.relevance and is_same_grid else None
    return Selection(strategy, setting.prune_ratio, whole, seed).kept(relevance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A prompt in a cache."""

    cache: KVCache
    logits: Tensor  # [V] after the prompt
    seconds: float
    queries: dict[RelevanceLaw, TextQueries]


def prefilled(model: VideoLM, prompt: Prompt, chunk: int, room: int, laws: Sequence[RelevanceLaw] = ()) -> Prefilled:
    """Prefill in chunks as a worker does, with `room` rows for an answer; for every law, note the text's queries."""
    geometry = model.decoder.geometry
    cache = KVCache(geometry, prompt.num_tokens + room)
    queries = {law: TextQueries(prompt, law, geometry, model.decoder.scale) for law in laws}

    def note(layer: int, rows: Tensor) -> None:
        for each in queries.values():
            observe = each.observer(cache.length, len(rows))
            if observe is not None:
                observe(layer, rows)

    started = time.perf_counter()
    while (logits := model.prefill(prompt, cache, chunk, note if laws else None)) is None:
        pass
    if logits.is_cuda:  # GPU kernels run asynchronously: wait for them before reading the clock
        torch.cuda.synchronize(logits.device)
    return Prefilled(cache=cache, logits=logits, seconds=time.perf_counter() - started, queries=queries)


def greedy_answer(model: VideoLM, prompt: Prompt, after: Prefilled, max_tokens: int) -> tuple[int, ...]:
    """The model's greedy text, including the end token; the cache then holds all of it but the last token."""
    sampler, cache = CoupledSampler(SamplingParams()), after.cache
    ids = sampler.choose(after.logits[None], [])
    while len(ids) < max_tokens and ids[-1] not in model.stop_ids:
        position = prompt.next_position + len(ids) - 1
        (logits,) = model.step([StepRows(cache=cache, ids=ids[-1:], position=position)])
        ids += sampler.choose(logits, ids)
    return tuple(ids)


def matches(model: VideoLM, prompt: Prompt, after: Prefilled, ids: Sequence[int]) -> tuple[bool, ...]:
    """For each token of `ids`, whether the model, given all before it, chooses the same. Restores the cache."""
    sampler, cache = CoupledSampler(SamplingParams()), after.cache
    scores = [after.logits[None]]
    if len(ids) > 1:
        scores += model.step([StepRows(cache=cache, ids=ids[:-1], position=prompt.next_position)])
        cache.truncate(prompt.num_tokens)
    chosen = sampler.choose(torch.cat(scores), [])
    return tuple(mine == theirs for mine, theirs in zip(chosen, ids, strict=True))


def mean_accepted(hits: Sequence[bool], window: int) -> tuple[int, int]:
    """Accepted proposals and verifications when `window` tokens are proposed at a time (serial schedule).

    A verification commits the accepted tokens and one more, the target's own.
    """
    at, accepted, verifications = 0, 0, 0
    while at < len(hits):
        proposed = hits[at : at + window]
        run = next((place for place, hit in enumerate(proposed) if not hit), len(proposed))
        accepted, verifications, at = accepted + run, verifications + 1, at + run + 1
    return accepted, verifications
