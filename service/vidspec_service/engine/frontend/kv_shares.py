"""KVShares: collects the memory that the workers measured, and tells each how many tokens its KV cache may hold.

Two workers may share a device, and its free memory is known only when both have loaded: so both ask, and are answered
together. A restarted worker gets the budget of the one before it, since nothing about requests has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.kv_budget import WorkerMemory, kv_budgets

logger = logging.getLogger(__name__)


class Grantee(Protocol):
    """A worker that waits for its budget."""

    def grant(self, num_tokens: int) -> None: ...


class KVShares:
    """The KV cache budgets of one engine's workers, by role. Workers on a CPU become ready without asking for one."""

    def __init__(self, config: EngineConfig, workers: Mapping[str, Grantee]) -> None:
        self._config = config
        self._workers = workers
        self._measured: dict[str, WorkerMemory] = {}
        self._unasked: set[str] = set()  # roles that became ready without asking
        self._budgets: dict[str, int] | None = None

    def measured(self, role: str, memory: WorkerMemory) -> None:
        """Called when a worker has loaded and waits. Raises ConfigError if the devices have no room for one context."""
        self._measured[role] = memory
        if self._budgets is not None:
            self._workers[role].grant(self._budgets[role])
        else:
            self._decide()

    def ready(self, role: str) -> None:
        """Called when a worker is ready. One on a CPU has not asked; the other need not wait for its measurements."""
        if self._budgets is None:
            self._unasked.add(role)
            self._decide()

    def _decide(self) -> None:
        if not self._measured or self._measured.keys() | self._unasked != self._workers.keys():
            return
        self._budgets = kv_budgets(self._measured, self._config.gpu_memory_utilization, self._config.kv_cache_tokens)
        for role, num_tokens in self._budgets.items():
            _log_memory(role, self._measured[role], num_tokens)
            self._workers[role].grant(num_tokens)


def _log_memory(role: str, memory: WorkerMemory, num_tokens: int) -> None:
    for each in memory.devices:
        facts = {
            "worker": role,
            "device": each.device,
            "kv_cache_tokens": num_tokens,
            "kv_cache_bytes": num_tokens * each.token_bytes,
            "weight_bytes": each.weights,
            "activation_bytes": each.activations,
            "free_bytes": each.free,
            "total_bytes": each.total,
        }
        logger.info("memory", extra=facts)
