"""How many tokens the KV caches may hold: as many as fit into what everything else leaves.

Of a device with T bytes (a GPU, or the machine for workers on a CPU), of which F are free when all workers on it have
loaded, `gpu_memory_utilization` u leaves

    room = u T - (T - F) - sum of the workers' activations

to keys and values, as vLLM counts it (`--gpu-memory-utilization`): what other programs hold counts as used. Workers
that share a device share the room by tokens, so that the draft can follow whatever the target has room for. A model
over several devices gets the tokens of the device that has room for the fewest.

The machine's memory is not as fixed as a GPU's: it is full of what other programs hold for now, and not all that work
may take is taken. So there a context is always granted, with a warning if not even its keys and values have room.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vidspec_service.errors import ConfigError

CPU_KV_CACHE_TOKENS = 65536  # at most, unless the operator says: a machine has other uses for its memory
_GIB = 2**30

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One worker on one CUDA device or in the machine's memory; sizes in bytes."""

    device: str
    total: int
    free: int  # for any program, when this was measured
    weights: int  # held by this worker at rest: weights, tables, captured graphs; in the machine's memory, libraries
    activations: int  # the most that its work adds: a tower, a prompt's rows, a chunk of prefill
    token_bytes: int  # of a token's keys, values and prompt row on this device


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """A loaded worker on all its devices."""

    context: int  # most tokens of one request
    measured_at: float  # on the monotonic clock of all processes
    devices: tuple[DeviceMemory, ...]


class KVBudgets:
    """Decides the budgets of one engine's workers, by role.

    Two workers may share a device, and its free memory is known only when both have loaded: so both wait for that. A
    restarted worker gets the budget of the one before it, since nothing about requests has changed.
    """

    def __init__(self, roles: Iterable[str], utilization: float, most: int | None = None) -> None:
        """For the other arguments, see `kv_budgets`."""
        self._roles = frozenset(roles)
        self._utilization = utilization
        self._most = most
        self._measured: dict[str, WorkerMemory] = {}
        self._budgets: dict[str, int] = {}

    def on_loaded(self, role: str, memory: WorkerMemory) -> dict[str, int]:
        """A worker has loaded and waits; returns the budgets to send now. Raises ConfigError if a GPU has no room for
        one context.
        """
        self._measured[role] = memory
        if self._budgets:
            return {role: self._budgets[role]}
        if self._measured.keys() != self._roles:
            return {}
        self._budgets = kv_budgets(self._measured, self._utilization, self._most)
        for each, num_tokens in self._budgets.items():
            _log_memory(each, self._measured[each], num_tokens)
        return self._budgets


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


def kv_budgets(workers: Mapping[str, WorkerMemory], utilization: float, most: int | None = None) -> dict[str, int]:
    """Tokens for each worker's KV cache, `most` at most. Raises ConfigError if a GPU has no room for a context.

    `utilization` is the share of every device that all workers together may fill, above 0 and at most 1.
    """
    budgets = {}
    for role, worker in workers.items():
        rooms = [_Room(mine.device, workers, utilization) for mine in worker.devices]
        tightest = min(rooms, key=lambda room: room.num_tokens)
        is_on_cpu = tightest.device == "cpu"
        if is_on_cpu:
            _warn_if_short(role, worker.context, tightest)
        elif tightest.num_tokens < worker.context:
            raise ConfigError(_refusal(role, worker.context, tightest, utilization))
        fits = max(tightest.num_tokens, worker.context)
        budgets[role] = min(fits, most or (CPU_KV_CACHE_TOKENS if is_on_cpu else fits))
    return budgets


class _Room:
    """The memory of one device that keys and values may fill."""

    def __init__(self, device: str, workers: Mapping[str, WorkerMemory], utilization: float) -> None:
        ordered = sorted(workers, key=lambda role: workers[role].measured_at)
        self.device = device
        self.sharers = {role: each for role in ordered for each in workers[role].devices if each.device == device}
        self.last = list(self.sharers.values())[-1]  # the last to measure, so it knows best what is free
        rest = self.last.total - self.last.free + sum(each.activations for each in self.sharers.values())
        self.num_bytes = max(int(utilization * self.last.total) - rest, 0)
        self.token_bytes = sum(each.token_bytes for each in self.sharers.values())
        self.num_tokens = self.num_bytes // self.token_bytes


def _refusal(role: str, context: int, room: _Room, utilization: float) -> str:
    held = "; ".join(
        f"{each} {_gib(of.weights)} GiB of weights and {_gib(of.activations)} of activations"
        for each, of in room.sharers.items()
    )
    remedies = [f"--max-context {room.num_tokens} or lower"] if room.num_tokens else []
    remedies += [f"--gpu-memory-utilization above {utilization:g}"] if utilization < 1 else []
    remedies += ["a device for each model (--draft-device)"] if len(room.sharers) > 1 else []
    remedies += ["a smaller model"] + (["several devices (--target-device cuda:0,cuda:1)"] if role == "target" else [])
    return (
        f"the {role} has no room for one context on {room.device}: {context} tokens need "
        f"{_gib(context * room.token_bytes)} GiB of keys and values, "
        f"but only {_gib(room.num_bytes)} GiB are left, enough for {room.num_tokens} tokens ({held}; "
        f"{_gib(room.last.free)} free of {_gib(room.last.total)}, of which a share of {utilization:g} may be used); "
        f"choose one of: {', '.join(remedies)}"
    )


def _warn_if_short(role: str, context: int, room: _Room) -> None:
    is_first = role == next(iter(room.sharers))
    if is_first and context * room.token_bytes > room.last.free:
        logger.warning(
            "there may be no room for one context: %d tokens need %s GiB of keys and values, but only %s GiB of memory "
            "are free, enough for %d tokens; choose a lower --max-context or a smaller model, or have more memory: the "
            "kernel ends a worker when none is left",
            context,
            _gib(context * room.token_bytes),
            _gib(room.last.free),
            room.last.free // room.token_bytes,
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"
