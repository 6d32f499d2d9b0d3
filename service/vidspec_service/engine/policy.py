"""How much to speculate: a speed model of the asynchronous loop and the plan that maximises it. Pure.

One cycle runs from one rejection to the next. After a rejection the draft needs `minimum` tokens' time before a
verification starts (with minimum 0 the target starts at once, alone). A verification of n proposals takes
`base + row * (n + 1)`, commits (1 - a^(n+1)) / (1 - a) tokens on average, and leaves the chain intact with
probability a^(n+1) (all n accepted, and the target's own next token equals the draft's). Meanwhile the draft has
proposed another `verification time / draft time` tokens, of which one is the token just judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

_MINIMUMS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16)
_WINDOWS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)
_MAX_ROUNDS = 64
_GRAIN = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Measured seconds. `row_s` is per row of all requests that share the forward."""

    base_s: float
    row_s: float
    draft_s: float  # one draft token of this request
    latency_s: float = 0.0002  # verdict out and first proposal back

    def verification_s(self, num_rows: float) -> float:
        return self.base_s + self.row_s * num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`minimum` proposals to wait for, `window` proposals per verification at most, `room` for the draft's lead."""

    minimum: int
    window: int
    room: int
    speedup: float  # predicted, over the target alone

    @property
    def is_off(self) -> bool:
        return self.window == 0


OFF = Plan(minimum=0, window=0, room=0, speedup=1.0)


def tokens_per_second(acceptance: float, costs: StepCosts, minimum: int, window: int, *, overlap: bool) -> float:
    """Rate of the loop at acceptance `acceptance` in [0, 1); with `overlap` False the draft waits for verdicts."""
    tokens, seconds, probability = 0.0, 0.0, 1.0
    available = 0.0
    for _ in range(_MAX_ROUNDS):
        waited = max(0.0, minimum - available) * costs.draft_s
        if available == 0.0 and minimum:
            waited += costs.latency_s
        pending = min(window, max(minimum, int(available)))
        verification = costs.verification_s(pending + 1)
        success = acceptance ** (pending + 1)
        tokens += probability * (1.0 - success) / (1.0 - acceptance)
        seconds += probability * (waited + verification)
        probability *= success
        if probability < 1e-4:
            break
        available = max(0.0, verification / costs.draft_s - 1.0) if overlap else 0.0
    return tokens / seconds


def best_plan(acceptance: float, costs: StepCosts, *, overlap: bool, least_gain: float) -> Plan:
    """The fastest plan; OFF when the predicted speed-up over the target alone stays below `least_gain`.

    Measurements are rounded first (rejection and ratios of times to 25 %), so that the search, as long as a small
    model's forward, is made once per situation and not once per token.
    """
    return _search(
        1.0 - min(_rounded(1.0 - acceptance), 1.0),
        _rounded(costs.row_s / costs.base_s),
        _rounded(costs.draft_s / costs.base_s),
        _rounded(costs.latency_s / costs.base_s),
        overlap,
        least_gain,
    )


def _rounded(ratio: float) -> float:
    return _GRAIN ** round(math.log(max(ratio, 1e-3), _GRAIN))


@lru_cache(maxsize=4096)
def _search(acceptance: float, row: float, draft: float, latency: float, overlap: bool, least_gain: float) -> Plan:
    costs = StepCosts(base_s=1.0, row_s=row, draft_s=draft, latency_s=latency)
    alone = 1.0 / costs.verification_s(1)
    best = OFF if least_gain >= 1.0 else Plan(minimum=0, window=0, room=0, speedup=0.0)
    for window in _WINDOWS:
        minimums = [*(minimum for minimum in _MINIMUMS if minimum < window), window] if overlap else [window]
        for minimum in minimums:
            rate = tokens_per_second(acceptance, costs, minimum, window, overlap=overlap)
            if rate / alone > max(best.speedup, least_gain):
                lead = int(costs.verification_s(window + 1) / draft) + 1 if overlap else 0
                room = window + min(lead, 2 * window) if overlap else window
                best = Plan(minimum=minimum, window=window, room=room, speedup=rate / alone)
    return best
