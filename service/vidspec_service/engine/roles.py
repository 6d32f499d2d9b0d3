"""Which workers an engine consists of, and what each is told: model, device, share of the CPU's cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vidspec_models.spec import ModelSpec
from vidspec_service.engine.messages import Configure
from vidspec_service.engine.types import EngineConfig, WorkerConfig

_BUNDLED_NAME = "vidspec-bundled"


def roles(config: EngineConfig) -> dict[str, WorkerConfig]:
    """Role to configuration; "draft" is missing where the target works alone."""
    found = {"target": config.target}
    if config.draft is not None:
        found["draft"] = config.draft
    return found


def configures(config: EngineConfig) -> list[Configure]:
    """The first message of every worker."""
    found = roles(config)
    num_cores = len(os.sched_getaffinity(0))
    threads = share_cores(found, num_cores)
    return [
        Configure(
            role=role,
            spec=ModelSpec(
                path=worker.model, role=role, revision=worker.revision, device=worker.device, dtype=worker.dtype
            ),
            threads=threads[role],
            prompt_threads=worker.threads or (num_cores if role == "target" else threads[role]),
            max_running=config.max_running,
            prefill_chunk=config.prefill_chunk,
            max_context=config.max_context,
            default_max_tokens=config.default_max_tokens,
            kv_tokens=config.kv_tokens,
            encoded_bytes=config.encoded_bytes,
            preservation=config.preservation.value,
            prune_ratio=config.prune_ratio,
            dycoke=config.dycoke,
            log_level=config.log_level,
            log_format=config.log_format,
        )
        for role, worker in found.items()
    ]


def share_cores(found: Mapping[str, WorkerConfig], num_cores: int) -> dict[str, int]:
    """Threads of every worker: the draft gets one core, the target the rest, unless a worker's config says else.

    A draft step is a chain of tiny products that a second thread cannot speed up, while the target's is not. (Compiled
    steps have one thread of their own; the target's prompts then use every core, the draft's steps beside them or not.)
    """
    chosen = {"draft": 1, "target": max(1, num_cores - 1) if "draft" in found else num_cores}
    return {role: worker.threads or chosen[role] for role, worker in found.items()}


def model_name(worker: WorkerConfig) -> str:
    """What clients call the model when the operator names nothing else."""
    return _BUNDLED_NAME if worker.model == "bundled" else Path(worker.model).name
