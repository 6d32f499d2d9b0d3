"""Acceptance without an engine: the draft's choice at every position of the target's own greedy text, in one forward.

The same models, caches, decoders and token choice as in the workers; acceptance is then exact and needs no schedule.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vidspec_models.inputs import Prompt
from vidspec_models.kv_cache import KVCache
from vidspec_models.preservation import RelevanceLaw, TextQueries
from vidspec_models.token_sampling import CoupledSampler, SamplingLaw
from vidspec_models.video_lm import StepRows, VideoLM


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
    queries = {law: TextQueries(prompt, law, geometry.num_layers, model.decoder.scale) for law in laws}

    def note(layer: int, rows: Tensor) -> None:
        for each in queries.values():
            observe = each.observer(cache.length, len(rows))
            if observe is not None:
                observe(layer, rows)

    started = time.perf_counter()
    logits = None
    while logits is None:
        logits = model.prefill(prompt, cache, chunk, note if laws else None)
    if logits.is_cuda:  # kernels run behind the interpreter's back on a GPU; a clock must wait for them
        torch.cuda.synchronize(logits.device)
    return Prefilled(cache=cache, logits=logits, seconds=time.perf_counter() - started, queries=queries)


def greedy_answer(model: VideoLM, prompt: Prompt, after: Prefilled, max_tokens: int) -> tuple[int, ...]:
    """The model's own text, the end token included; the cache then holds all of it but its last token."""
    sampler, cache = CoupledSampler(SamplingLaw()), after.cache
    ids = sampler.choose(after.logits[None], 0)
    while len(ids) < max_tokens and ids[-1] not in model.stop_ids:
        position = prompt.next_position + len(ids) - 1
        (logits,) = model.step([StepRows(cache=cache, ids=ids[-1:], position=position)])
        ids += sampler.choose(logits, len(ids))
    return tuple(ids)


def matches(model: VideoLM, prompt: Prompt, after: Prefilled, ids: Sequence[int]) -> tuple[bool, ...]:
    """At which tokens of `ids` the model's own choice, given all before, is the same. Leaves the cache as found."""
    sampler, cache = CoupledSampler(SamplingLaw()), after.cache
    scores = [after.logits[None]]
    if len(ids) > 1:
        scores += model.step([StepRows(cache=cache, ids=ids[:-1], position=prompt.next_position)])
        cache.truncate(prompt.num_tokens)
    chosen = sampler.choose(torch.cat(scores), 0)
    return tuple(mine == theirs for mine, theirs in zip(chosen, ids, strict=True))


def mean_accepted(hits: Sequence[bool], window: int) -> tuple[int, int]:
    """Accepted proposals and verifications when `window` tokens are proposed at a time (serial schedule).

    A verification commits the accepted ones and one token more, which is the target's own.
    """
    at, accepted, verifications = 0, 0, 0
    while at < len(hits):
        proposed = hits[at : at + window]
        run = next((place for place, hit in enumerate(proposed) if not hit), len(proposed))
        accepted, verifications, at = accepted + run, verifications + 1, at + run + 1
    return accepted, verifications
