"""How many tokens the KV caches on CUDA devices may hold: as many as fit into what everything else leaves. Pure.

Of a device with T bytes, of which F are free when all workers on it have loaded, `gpu_memory_utilization` u leaves

    room = u T - (T - F) - sum of the workers' activations

to keys and values, as vLLM counts it (`--gpu-memory-utilization`): what other programs hold counts as used. Workers
that share a device share the room by tokens, so that the draft can follow whatever the target has room for. A model
over several devices gets the tokens of the device that has room for the fewest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vidspec_service.errors import ConfigError

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One worker on one CUDA device; sizes in bytes."""

    device: str
    total: int
    free: int  # for any program, when this was measured
    weights: int  # held by this worker at rest: weights, tables, captured graphs
    activations: int  # the most that its work adds: a tower, a prompt's rows, a chunk of prefill
    token_bytes: int  # of a token's keys, values and prompt row on this device


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """A loaded worker on all its devices."""

    context: int  # most tokens of one request
    measured_at: float  # on the monotonic clock of all processes
    devices: tuple[DeviceMemory, ...]


def kv_budgets(workers: Mapping[str, WorkerMemory], utilization: float, most: int | None = None) -> dict[str, int]:
    """Tokens for each worker's KV cache, `most` at most. Raises ConfigError if one of them has no room for a context.

    `utilization` is the share of every device that all workers together may fill, above 0 and at most 1.
    """
    budgets = {}
    for role, worker in workers.items():
        rooms = [_Room(mine.device, workers, utilization) for mine in worker.devices]
        tightest = min(rooms, key=lambda room: room.num_tokens)
        if tightest.num_tokens < worker.context:
            raise ConfigError(_refusal(role, worker.context, tightest, utilization))
        budgets[role] = min(tightest.num_tokens, most or tightest.num_tokens)
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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"
