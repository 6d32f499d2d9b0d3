"""One optimiser step: workers compute the gradients; Muon (hidden matrices) and AdamW (all others) apply them.

Muon replaces a matrix gradient's momentum by its nearest orthogonal matrix; small language models then need
markedly fewer steps. torch.optim.Muon has the same rule, but always multiplies in bfloat16: on a processor without
bfloat16 units, one 512 x 1024 matrix takes 6 s there, and 0.07 s here.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from vidspec_models.decoder.placement import is_faster_in_bfloat16

Item = TypeVar("Item")
Result = TypeVar("Result")
_CPU_UNIT_CLIPS = 2
_MATRICES_PER_JOB = 2
_MOMENTUM = 0.95
_SAFETY = 1.01  # as in the schedule's own code: values that bfloat16 rounds out of the valid range would diverge
_COEFFICIENTS = tuple(
    (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)
    for a, b, c in (  # polar-express schedule: four steps are as good as five of the classic quintic
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    )
)


class Workers:
    """A fixed set of single-threaded workers for the units of a step; with one worker, everything runs in the caller.

    On a shared CPU this is faster than multi-threaded operators: they wait at every operator for the slower core, while
    a slower worker takes fewer units. Results do not depend on which worker takes which unit.
    """

    def __init__(self, device: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count) if device == "cpu" and count > 1 else None
        if self._pool is not None:
            torch.set_num_threads(1)
        self._is_cpu = device == "cpu"
        self._warm: set[object] = set()

    def units(self, clips: range) -> list[range]:
        """The clips of a step, split into units that a worker takes one at a time."""
        size = _CPU_UNIT_CLIPS if self._is_cpu else len(clips)
        return [clips[start : start + size] for start in range(0, len(clips), size)]

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], key: object = None) -> list[Result]:
        """Results in order. The first item of a new `key` runs alone, so that compilation happens once."""
        if self._pool is None:
            return [function(item) for item in items]
        first: list[Result] = []
        if key is not None and key not in self._warm:
            first, items = [function(items[0])], items[1:]
            self._warm.add(key)
        return first + list(self._pool.map(function, items))


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum. A worker's job is a batched product of a few matrices of the same shape."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], workers: Workers, lr: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._workers = workers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            jobs = [
                (group, params[start : start + _MATRICES_PER_JOB])
                for params in by_shape.values()
                for start in range(0, len(params), _MATRICES_PER_JOB)
            ]
            self._workers.map(self._update, jobs)

    @torch.no_grad()
    def _update(self, job: tuple[dict[str, Any], list[torch.nn.Parameter]]) -> None:
        group, params = job
        updates = []
        for param in params:
            assert param.grad is not None
            state = self.state[param]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(param)
            buffer = state["momentum"]
            buffer.lerp_(param.grad, 1 - _MOMENTUM)
            updates.append(param.grad.lerp(buffer, _MOMENTUM))
        # Scaled so that an update has the root mean square of a typical AdamW step.
        scale = 0.2 * max(params[0].shape) ** 0.5 * group["lr"]
        for param, update in zip(params, _orthogonalise(torch.stack(updates)), strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def _orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    if x.device.type == "cpu" and is_faster_in_bfloat16():  # half the time, with no more error than four steps have
        x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in _COEFFICIENTS:
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a, alpha=1.0)
    return (x.mT if tall else x).float()


class MuonWithAdamW:
    """Both optimisers behind one interface: gradients from several threads add up, and the state can be saved."""

    def __init__(
        self, trained: Mapping[str, torch.nn.Module], workers: Workers, *, matrix_lr: float, other_lr: float
    ) -> None:
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, param in torch.nn.ModuleDict(trained).named_parameters():
            if param.requires_grad:
                hidden = param.ndim == 2 and "embed" not in name and "head" not in name
                (matrices if hidden else others).append(param)
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, workers, lr=matrix_lr, weight_decay=0.01),
            torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True),
        )
        self._base = tuple(part.param_groups[0]["lr"] for part in self._parts)
        self._params = [*matrices, *others]
        self._lock = threading.Lock()

    def add_gradients(self, loss: torch.Tensor) -> None:
        """Back-propagate, from any thread; parameters that the loss does not depend on stay unchanged."""
        gradients = torch.autograd.grad(loss, self._params, allow_unused=True)
        with self._lock, torch.no_grad():
            for param, gradient in zip(self._params, gradients, strict=True):
                if gradient is not None:
                    param.grad = gradient if param.grad is None else param.grad.add_(gradient)

    def step(self, lr_scale: float) -> float:
        """Clip, step with all rates scaled, clear the gradients; returns the gradient norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._params, 1.0))
        for part, base in zip(self._parts, self._base, strict=True):
            part.param_groups[0]["lr"] = base * lr_scale
            if math.isfinite(norm):  # skip a step whose gradients overflowed
                part.step()
            part.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict[str, object]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, state: list[dict[str, object]]) -> None:
        for part, saved in zip(self._parts, state, strict=True):
            part.load_state_dict(saved)
