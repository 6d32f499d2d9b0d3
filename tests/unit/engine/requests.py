"""Minimal requests for the tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from vidspec_models.compression.dycoke import KVPruner
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.grammar import GrammarMask
from vidspec_models.prompt import Prompt
from vidspec_models.request import Compression, GenerationRequest, SamplingParams, SpeculationMode, Turn
from vidspec_models.sampling import CoupledSampler
from vidspec_service.engine.speculation.plan import SpeculationState
from vidspec_service.engine.target.request import TargetRequest

NOTHING = cast(Any, None)


def request_of(
    name: str = "r",
    mode: SpeculationMode = SpeculationMode.OFF,
    *,
    seed: int = 0,
    max_tokens: int | None = None,
    caller: str = "",
    compression: Compression = Compression.NONE,
    committed: tuple[int, ...] = (),
) -> GenerationRequest:
    """A greedy request without a video; its text is its name."""
    return GenerationRequest(
        request_id=name,
        caller=caller,
        turns=(Turn(role="user", parts=(name,)),),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=seed),
        speculation=mode,
        compression=compression,
        committed=committed,
    )


def target_request(
    prompt: Prompt = NOTHING,
    cache: KVCache = NOTHING,
    *,
    name: str = "r",
    mode: SpeculationMode = SpeculationMode.OFF,
    acceptance: float = 0.9,
    max_tokens: int = 100,
    stop_ids: frozenset[int] = frozenset(),
    committed: Sequence[int] = (),
    pruner: KVPruner | None = None,
    prepare_s: float = 0.0,
    caller: str = "",
    grammar: GrammarMask | None = None,
) -> TargetRequest:
    """The target's state of a greedy request."""
    request = TargetRequest(
        asked=request_of(name, mode, caller=caller),
        prompt=prompt,
        cache=cache,
        sampler=CoupledSampler(SamplingParams()),
        speculation=SpeculationState(mode=mode, acceptance=acceptance),
        stop_ids=stop_ids,
        max_tokens=max_tokens,
        pruner=pruner,
        prepare_s=prepare_s,
        grammar=grammar,
    )
    request.commit(committed)
    return request
