"""Probes: forward times of target and draft on their own, each in a fresh process with the threads of its worker."""

from __future__ import annotations

import os
from dataclasses import replace

from vidspec_models.spec import ModelSpec
from vidspec_service.bench.child import Child
from vidspec_service.bench.costs import Forwards, ProbedCosts
from vidspec_service.bench.probe_worker import ProbeReply, ProbeRequest
from vidspec_service.engine.roles import roles, share_cores
from vidspec_service.engine.types import EngineConfig, SpeculationMode, WorkerConfig

TARGET_ROWS = (1, 2, 5, 9, 17)
_DRAFT_ROWS = (1,)
_REPEATS = 60
_PROBE_WORKER = "vidspec_service.bench.probe_worker"
_TIMEOUT_S = 900.0


def alone_config(pair: EngineConfig) -> EngineConfig:
    """The same target without a draft and with every core."""
    target = replace(pair.target, threads=None)
    return replace(pair, target=target, draft=None, speculation=SpeculationMode.OFF)


def threads_of(config: EngineConfig) -> dict[str, int]:
    """What the engine gives each of its workers."""
    return share_cores(roles(config), len(os.sched_getaffinity(0)))


def spec_of(worker: WorkerConfig, role: str) -> ModelSpec:
    """The model that a worker of this role loads."""
    return ModelSpec(path=worker.model, role=role, revision=worker.revision, device=worker.device, dtype=worker.dtype)


def probe_costs(pair: EngineConfig, context: int, rows: tuple[int, ...] = TARGET_ROWS) -> ProbedCosts:
    """The target's forwards over so many rows, the draft's over one, none beside another. Raises ConfigError."""
    threads, alone = threads_of(pair), alone_config(pair)
    target = spec_of(pair.target, "target")
    found = probe_forwards(target, threads["target"], context, rows)
    return ProbedCosts(
        context=context,
        target=found,
        alone=found
        if threads["target"] == threads_of(alone)["target"]
        else probe_forwards(target, threads_of(alone)["target"], context, rows),
        draft=probe_forwards(spec_of(pair.draft, "draft"), threads["draft"], context, _DRAFT_ROWS)
        if pair.draft is not None
        else None,
    )


def probe_forwards(spec: ModelSpec, threads: int, context: int, rows: tuple[int, ...]) -> Forwards:
    """Time one model."""
    request = ProbeRequest(spec=spec, threads=threads, context=context, rows=rows, repeats=_REPEATS)
    with Child(_PROBE_WORKER, _TIMEOUT_S) as child:
        reply = child.ask(request, ProbeReply)
    return Forwards(
        threads=threads,
        seconds=dict(zip(rows, reply.seconds, strict=True)),
        device=reply.device,
        device_name=reply.device_name,
        dtype=reply.dtype,
        rows_are_invariant=reply.rows_are_invariant,
    )
