"""How much to speculate: a speed model of the asynchronous loop and the plan that maximises it. Pure.

One cycle runs from one rejection to the next. After a rejection the draft needs the time of `min_draft_tokens` tokens
before a verification starts (with 0 the target starts at once, alone). A verification of n proposals takes
`base + row * (n + 1)`, commits (1 - a^(n+1)) / (1 - a) tokens on average, and leaves the chain intact with
probability a^(n+1) (all n accepted, and the target's own next token equals the draft's). Meanwhile the draft has
proposed another `verification time / draft time` tokens, of which one is the token just judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest

_LEAST = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)
_MOST = (1, 2, 4, 6, 8, 12, 16, 24, 32)
_GRAIN = 1.25  # of rounded measurements
_CANDIDATES = 3  # what is best for rounded measurements is not always best for the exact ones
_MOST_ACCEPTANCE, _LEAST_RATIO = 0.99, 1e-3


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
    """How far the draft runs, and how much of that the target waits for and verifies at once."""

    min_draft_tokens: int  # to wait for before a verification
    max_draft_tokens: int  # in one verification
    max_lead: int  # of the draft over what is committed
    speedup: float  # predicted, over the target alone

    @property
    def is_off(self) -> bool:
        return self.max_draft_tokens == 0


OFF = Plan(min_draft_tokens=0, max_draft_tokens=0, max_lead=0, speedup=1.0)


def tokens_per_second(acceptance: float, costs: StepCosts, least: int, most: int, *, overlap: bool) -> float:
    """Rate of the loop at acceptance `acceptance` in [0, 1), waiting for `least` draft tokens and verifying `most`.

    With `overlap` False the draft waits for verdicts.
    """
    tokens, seconds, probability = 0.0, 0.0, 1.0
    available, before = 0.0, -1
    while True:
        waited = max(0.0, least - available) * costs.draft_s
        if available == 0.0 and least:
            waited += costs.latency_s
        pending = min(most, max(least, int(available)))
        verification = costs.verification_s(pending + 1)
        success = acceptance ** (pending + 1)
        # A round leaves as much for the next one as an equal round before it did: from there on all are equal.
        weight = probability / (1.0 - success) if pending == before else probability
        tokens += weight * (1.0 - success) / (1.0 - acceptance)
        seconds += weight * (waited + verification)
        if pending == before:
            break
        available, before = max(0.0, verification / costs.draft_s - 1.0) if overlap else 0.0, pending
        probability *= success
    return tokens / seconds


def best_plan(acceptance: float, costs: StepCosts, *, overlap: bool, least_gain: float) -> Plan:
    """The fastest plan; OFF when the predicted speed-up over the target alone stays below `least_gain`.

    The search takes half a millisecond. It is made for rounded measurements (rejection and ratios of times to
    a quarter), so once per situation and not once per token; what its plan gains is worked out exactly.
    """
    acceptance = min(max(acceptance, 0.0), _MOST_ACCEPTANCE)
    candidates = _search(
        1.0 - min(_rounded(1.0 - acceptance), 1.0),
        _rounded(costs.row_s / costs.base_s),
        _rounded(costs.draft_s / costs.base_s),
        _rounded(costs.latency_s / costs.base_s),
        overlap,
    )
    rates = {plan: tokens_per_second(acceptance, costs, *plan, overlap=overlap) for plan in candidates}
    least, most = max(candidates, key=rates.__getitem__)
    speedup = rates[least, most] * costs.verification_s(1)
    if speedup <= least_gain:
        return OFF
    lead = int(costs.verification_s(most + 1) / costs.draft_s) + 1 if overlap else 0
    return Plan(min_draft_tokens=least, max_draft_tokens=most, max_lead=most + min(lead, 2 * most), speedup=speedup)


def _rounded(ratio: float) -> float:
    return _GRAIN ** round(math.log(max(ratio, _LEAST_RATIO), _GRAIN))


@lru_cache(maxsize=4096)
def _search(acceptance: float, row: float, draft: float, latency: float, overlap: bool) -> list[tuple[int, int]]:
    """(least, most) draft tokens of the plans of the highest rates; times in units of the base.

    Each waits for another number of proposals: plans that wait equally long are often equally good, and where the
    draft's lead is a whole number at the rounded times, all that count on it fail together at the exact ones.
    """
    costs = StepCosts(base_s=1.0, row_s=row, draft_s=draft, latency_s=latency)

    def rate(plan: tuple[int, int]) -> float:
        return tokens_per_second(acceptance, costs, *plan, overlap=overlap)

    if not overlap:
        return nlargest(_CANDIDATES, [(most, most) for most in _MOST], key=rate)
    by_least = [[(least, most) for most in _MOST if most >= max(least, 1)] for least in _LEAST]
    return nlargest(_CANDIDATES, [max(plans, key=rate) for plans in by_least], key=rate)
