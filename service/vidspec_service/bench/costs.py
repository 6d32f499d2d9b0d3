"""What a forward costs, alone, and the speed-up that the policy's speed model makes of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vidspec_service.bench.options import Mode
from vidspec_service.engine.policy import Plan, StepCosts, best_plan, tokens_per_second

_MOST_ACCEPTANCE = 0.99  # as in the policy: the model has a pole at 1
_LEAST_GAIN_AUTO = 1.05  # as in `engine/speculation.py`


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """One model as probed on its own: median seconds of a forward over n rows."""

    threads: int
    seconds: Mapping[int, float]
    device: str
    dtype: str
    device_name: str = ""
    rows_are_invariant: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedCosts:
    """The target with the threads it has beside a draft, the target with all cores, and the draft."""

    context: int
    target: Forwards
    alone: Forwards
    draft: Forwards | None = field(default=None)

    @property
    def cost_ratio(self) -> float | None:
        """c = T_target(1) / T_draft(1)."""
        return self.target.seconds[1] / self.draft.seconds[1] if self.draft is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The plan that the policy would make, and its speed over the target alone on all cores."""

    plan: Plan
    speedup: float


def step_costs(target: Forwards, draft_s: float, latency_s: float) -> StepCosts:
    """The line base + row * n nearest to the probed forwards."""
    rows = np.array(sorted(target.seconds), dtype=np.float64)
    seconds = np.array([target.seconds[int(num_rows)] for num_rows in rows])
    base_s, row_s = np.polynomial.polynomial.polyfit(rows, seconds, 1)
    base_s, row_s = max(float(base_s), 1e-6), max(float(row_s), 0.0)
    return StepCosts(base_s=base_s, row_s=row_s, draft_s=draft_s, latency_s=latency_s)


def predict(mode: Mode, acceptance: float, costs: ProbedCosts, latency_s: float) -> Prediction | None:
    """Speed-up of a speculating mode over `off` at this acceptance; None for modes that do not speculate."""
    if not mode.needs_draft or costs.draft is None:
        return None
    step = step_costs(costs.target, costs.draft.seconds[1], latency_s)
    acceptance = min(acceptance, _MOST_ACCEPTANCE)
    overlap = mode is not Mode.SERIAL
    plan = best_plan(acceptance, step, overlap=overlap, least_gain=_LEAST_GAIN_AUTO if mode is Mode.AUTO else 0.0)
    if plan.is_off:
        rate = 1.0 / step.verification_s(1)
    else:
        rate = tokens_per_second(acceptance, step, plan.minimum, plan.window, overlap=overlap)
    return Prediction(plan=plan, speedup=rate * costs.alone.seconds[1])
