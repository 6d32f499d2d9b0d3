"""How many tokens the KV caches on CUDA devices may hold: what is left of them once all else has its room. Pure.

Of a device with T bytes, of which F are free when all workers on it have loaded, `gpu_memory_utilization` u leaves

    room = u T - (T - F) - sum of the workers' activations

to keys and values, as vLLM counts it (`--gpu-memory-utilization`): what other programs hold counts as used. Workers
that share a device share the room by tokens, so that the draft can follow whatever the target has room for. A model
over several devices has as many tokens as the device that has room for the fewest.
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
    free: int  # to anybody, when this was measured
    weights: int  # that this worker holds at rest: weights, tables, captured graphs
    activations: int  # that it takes besides at most: a tower, a prompt's rows, a chunk of prefill
    token_bytes: int  # of a token's keys, values and prompt row here


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """A loaded worker on all its devices."""

    context: int  # tokens of one request at most
    measured_at: float  # on the monotonic clock of all processes
    devices: tuple[DeviceMemory, ...]


def kv_budgets(workers: Mapping[str, WorkerMemory], utilization: float, most: int | None = None) -> dict[str, int]:
    """Tokens for each worker's KV cache, `most` at most. Raises ConfigError if one of them has no room for a context.

    `utilization` is the share of every device that all of them together may fill, above 0 and at most 1.
    """
    budgets = {}
    for role, worker in workers.items():
        tokens = {mine: _num_tokens(mine.device, workers, utilization) for mine in worker.devices}
        tightest = min(tokens, key=lambda mine: tokens[mine])
        if tokens[tightest] < worker.context:
            raise ConfigError(_refusal(role, tightest.device, workers, utilization))
        budgets[role] = min(tokens[tightest], most or tokens[tightest])
    return budgets


def _on(device: str, workers: Mapping[str, WorkerMemory]) -> dict[str, DeviceMemory]:
    """Who is on a device; the last to have measured comes last, and knows best what is free."""
    ordered = sorted(workers, key=lambda role: workers[role].measured_at)
    return {role: each for role in ordered for each in workers[role].devices if each.device == device}


def _room(device: str, workers: Mapping[str, WorkerMemory], utilization: float) -> int:
    """Bytes for keys and values on a device; negative if even the rest does not fit."""
    there = list(_on(device, workers).values())
    used = there[-1].total - there[-1].free
    return int(utilization * there[-1].total) - used - sum(each.activations for each in there)


def _token_bytes(device: str, workers: Mapping[str, WorkerMemory]) -> int:
    return sum(each.token_bytes for each in _on(device, workers).values())


def _num_tokens(device: str, workers: Mapping[str, WorkerMemory], utilization: float) -> int:
    return max(_room(device, workers, utilization), 0) // _token_bytes(device, workers)


def _refusal(role: str, device: str, workers: Mapping[str, WorkerMemory], utilization: float) -> str:
    there, context = _on(device, workers), workers[role].context
    room, tokens = _room(device, workers, utilization), _num_tokens(device, workers, utilization)
    held = "; ".join(
        f"{each} {_gib(of.weights)} GiB of weights and {_gib(of.activations)} of activations"
        for each, of in there.items()
    )
    last = list(there.values())[-1]
    remedies = [f"--max-context {tokens} or lower"] if tokens else []
    remedies += [f"--gpu-memory-utilization above {utilization:g}"] if utilization < 1 else []
    remedies += ["a device for each model (--draft-device)"] if len(there) > 1 else []
    remedies += ["a smaller model"] + (["several devices (--target-device cuda:0,cuda:1)"] if role == "target" else [])
    return (
        f"the {role} has no room for one context on {device}: {context} tokens need "
        f"{_gib(context * _token_bytes(device, workers))} GiB of keys and values, "
        f"{_gib(max(room, 0))} are left for {tokens} tokens ({held}; {_gib(last.free)} free of "
        f"{_gib(last.total)}, of which {utilization:g} may be used); choose {', '.join(remedies)}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"
