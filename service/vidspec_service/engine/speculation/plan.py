"""How much to speculate: a speed model of the asynchronous loop, the fastest plan by it, and the measurements it needs.

One cycle runs from one rejection to the next. After a rejection the draft needs the time of `min_draft_tokens` tokens
before a verification starts (with 0 the target starts at once, alone). A verification of n proposals takes
`base + row * (n + 1)`, commits (1 - a^(n+1)) / (1 - a) tokens on average, and leaves the chain intact with
probability a^(n+1) (all n accepted, and the target's own next token equals the draft's). Meanwhile the draft has
proposed another `verification time / draft time` tokens, of which one is the token just judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import nlargest

from vidspec_models.request import SpeculationMode
from vidspec_service.engine.speculation.proposals import ProposalChain

_MIN_CHOICES = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)
_MAX_CHOICES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
MAX_DRAFT_TOKENS = _MAX_CHOICES[-1]  # in one verification, whatever the plan
MAX_AHEAD = 2 * MAX_DRAFT_TOKENS  # tokens that the draft may be ahead
_GRAIN = 1.25  # measurements are rounded to powers of this
_CANDIDATES = 3  # plans compared exactly: the best for rounded measurements is not always the best for exact ones
MAX_ACCEPTANCE = 0.99  # nothing that is guessed is certain
_MIN_RATIO = 1e-3
_PRIOR = 32  # judged tokens that the acceptance of earlier answers counts as
_MAX_COUNTED = 128  # that the acceptance is a mean of; with 30, one rejection halved the length of the best plan
MIN_GAIN_AUTO = 1.05  # least predicted speed-up over the target alone for `auto` to speculate
_MAX_DEMANDED = 0.9  # limit of `least_likely`
_FORWARDS_PER_PLAN = 4  # planning takes a twentieth of a small target's forward, and plans change little in between
_DECAY = 0.98  # weight of earlier forwards, per forward
_MAX_SURPRISE = 4.0  # a forward counts as at most this many times its estimate: one that lost its core is no measure
# Least base, as a share of the first step of one row: after a slow forward of many rows, rows alone could explain all
# times, and then no plan would ever pay.
_LEAST_BASE = 0.5
_STRIDE_DECAY = 0.9  # of earlier strides, which have several tokens each
_GUESSED_RATIO = 8  # time of a target's step over that of a draft token, until measured
FADE = 0.05  # share of a measurement that is forgotten with each answer that measures nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Measured seconds. `row_s` is the time of one more row for each request that shares the forward."""

    base_s: float
    row_s: float
    draft_s: float  # one draft token of this request
    latency_s: float = 0.0002  # verdict out and first proposal back
    stride_s: float | None = None  # per token of a stride: several tokens that the target alone decodes in one call

    @property
    def alone_s(self) -> float:
        """A token without speculation."""
        return self.verification_s(1) if self.stride_s is None else self.stride_s

    def verification_s(self, num_rows: float) -> float:
        return self.base_s + self.row_s * num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How far the draft runs ahead, and how many draft tokens the target waits for and verifies at once."""

    min_draft_tokens: int  # to wait for before a verification
    max_draft_tokens: int  # in one verification, not counting certain tokens
    max_lead: int  # of the draft over the committed tokens, not counting certain tokens
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
        # A round that verifies as many tokens as the one before leaves as many: all rounds after it are equal.
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

    The search takes half a millisecond. It uses rounded measurements (rejection and ratios of times to a quarter) and
    its result is cached, so it runs once per situation, not once per token. The plan's gain is computed exactly.
    """
    acceptance = min(max(acceptance, 0.0), MAX_ACCEPTANCE)
    candidates = _search(
        1.0 - min(_rounded(1.0 - acceptance), 1.0),
        _rounded(costs.row_s / costs.base_s),
        _rounded(costs.draft_s / costs.base_s),
        _rounded(costs.latency_s / costs.base_s),
        overlap,
    )
    rates = {plan: tokens_per_second(acceptance, costs, *plan, overlap=overlap) for plan in candidates}
    least, most = max(candidates, key=rates.__getitem__)
    speedup = rates[least, most] * costs.alone_s
    if speedup <= least_gain:
        return OFF
    lead = int(costs.verification_s(most + 1) / costs.draft_s) + 1 if overlap else 0
    return Plan(min_draft_tokens=least, max_draft_tokens=most, max_lead=most + min(lead, 2 * most), speedup=speedup)


def _rounded(ratio: float) -> float:
    return _GRAIN ** round(math.log(max(ratio, _MIN_RATIO), _GRAIN))


@lru_cache(maxsize=4096)
def _search(acceptance: float, row: float, draft: float, latency: float, overlap: bool) -> list[tuple[int, int]]:
    """(least, most) draft tokens of the fastest plans; times in units of the base.

    Each plan waits for a different number of proposals. Plans that wait for the same number are often equally good; if
    the draft's lead is a whole number at the rounded times, all plans that need it fail together at the exact times.
    """
    costs = StepCosts(base_s=1.0, row_s=row, draft_s=draft, latency_s=latency)

    def rate(plan: tuple[int, int]) -> float:
        return tokens_per_second(acceptance, costs, *plan, overlap=overlap)

    if not overlap:
        return nlargest(_CANDIDATES, [(most, most) for most in _MAX_CHOICES], key=rate)
    by_least = [[(least, most) for most in _MAX_CHOICES if most >= max(least, 1)] for least in _MIN_CHOICES]
    return nlargest(_CANDIDATES, [max(plans, key=rate) for plans in by_least], key=rate)


@dataclass(slots=True)
class SpeculationState:
    """One request's mode, measurements, proposals and plan. Every plan is made from current numbers only."""

    mode: SpeculationMode
    acceptance: float
    chain: ProposalChain = field(default_factory=ProposalChain)
    plan: Plan = OFF
    num_sent: int = 0  # committed tokens that the draft knows of
    is_measured: bool = False  # something was judged, so that `acceptance` is not a guess any more
    is_followed: bool = False  # the draft has lately proposed something, so it is worth waiting for
    expected_until: float = 0.0  # monotonic time up to which the first proposal is awaited; 0: it is not
    draft_video_tokens: int = 0  # video tokens that the draft saw when it last proposed
    least_likely: float = 0.0  # a draft token is verified if it and all before it hold with this probability
    _num_judged: int = 0
    _num_served: int = 0  # forwards since the first plan

    @property
    def is_alone(self) -> bool:
        """The target need not expect proposals."""
        return self.plan.is_off or not self.is_followed

    def replan(self, costs: StepCosts, *, take_turns: bool) -> None:
        """Choose a plan for the next forwards; `mode` is not off. Called before each; usually keeps the last plan.

        If the models take turns on one device, `auto` plans without overlap.
        """
        self._num_served += 1
        if self._num_served % _FORWARDS_PER_PLAN != 1:
            return
        least = MIN_GAIN_AUTO if self.mode is SpeculationMode.AUTO else 0.0
        overlap = self.mode is SpeculationMode.PARALLEL or (self.mode is SpeculationMode.AUTO and not take_turns)
        self.plan = best_plan(self.acceptance, costs, overlap=overlap, least_gain=least)
        # An accepted draft token saves the time of one token under this plan; it costs one row of the forward.
        self.least_likely = min(costs.row_s * self.plan.speedup / costs.alone_s, _MAX_DEMANDED)

    def num_worth(self) -> int:
        """How many leading proposals are each worth a row of the next forward."""
        if self.plan.is_off:
            return 0
        return min(self.chain.num_worth(self.least_likely, self.plan.max_draft_tokens), MAX_DRAFT_TOKENS)

    def observe(self, num_accepted: int, *, is_rejected: bool) -> None:
        """Fold one verification into the running acceptance rate, which counts only proposals that could be wrong."""
        self.is_measured |= num_accepted > 0 or is_rejected
        for outcome in [1.0] * num_accepted + [0.0] * is_rejected:
            self._num_judged += 1
            self.acceptance += (outcome - self.acceptance) / min(_PRIOR + self._num_judged, _MAX_COUNTED)

    def drop(self) -> None:
        """The draft is gone: go on alone. Losses of its chain are still reported with the next tokens."""
        self.chain.forget()
        self.plan = OFF
        self.num_sent = 0
        self.is_followed = False
        self.expected_until = 0.0
        self._num_served = 0


class CostMeter:
    """Running estimates: forward time as base + row * rows, time per token of a stride, and time per draft token."""

    def __init__(
        self, *, base_s: float, row_s: float, draft_s: float | None = None, stride_s: float | None = None
    ) -> None:
        """Without `draft_s` (the draft may be on another device) it is estimated as an eighth of `base_s`."""
        self.base_s = base_s
        self.row_s = row_s
        self.draft_s = base_s / _GUESSED_RATIO if draft_s is None else draft_s
        self.stride_s = stride_s
        self._least_base_s = (base_s + row_s) * _LEAST_BASE
        self._sums = [0.0] * 5  # of forwards, rows, rows², seconds, rows * seconds; old ones fade
        self._is_stale = False  # no forward was observed since the last `fade_steps`

    def observe(self, num_rows: int, seconds: float) -> None:
        """Least squares over recent forwards; needs some spread in the row counts to move the slope."""
        self._is_stale = False
        seconds = min(seconds, _MAX_SURPRISE * (self.base_s + self.row_s * num_rows))
        new = (1.0, num_rows, num_rows**2, seconds, num_rows * seconds)
        self._sums = [_DECAY * old + value for old, value in zip(self._sums, new, strict=True)]
        n, rows, rows2, time_s, rows_time_s = self._sums
        spread = n * rows2 - rows**2
        if spread > 0.5 * n**2:
            slope = (n * rows_time_s - rows * time_s) / spread
            self.row_s = max(min(slope, (time_s - n * self._least_base_s) / rows), 0.0)
        self.base_s = max(time_s / n - self.row_s * rows / n, self._least_base_s)

    def observe_stride(self, seconds: float) -> None:
        """Count the time per token of a stride."""
        before = seconds if self.stride_s is None else self.stride_s
        self.stride_s = _STRIDE_DECAY * before + (1 - _STRIDE_DECAY) * seconds

    def fade_draft(self) -> None:
        """A whole answer came without a proposal: the measured time of a draft token may be out of date."""
        self.draft_s += FADE * (self.base_s / _GUESSED_RATIO - self.draft_s)

    def fade_steps(self) -> None:
        """An answer came without a proposal: if there was no forward meanwhile, only strides, the measured times of a
        step and of its rows may be out of date. A step's is at least a stride's.
        """
        if self._is_stale and self.stride_s is not None:
            self.row_s *= 1.0 - FADE
            self.base_s -= FADE * max(self.base_s - max(self.stride_s - self.row_s, self._least_base_s), 0.0)
            self._sums = [0.0] * 5  # the next forward is believed at once
        self._is_stale = True

    def costs(self, num_requests: int, *, in_strides: bool = False) -> StepCosts:
        """Costs for one of `num_requests` that share each forward; with `in_strides`, for a request that can have them.

        A token of a stride is never put higher than a step, which is measured all the time. Otherwise one slow stride
        would rule out the later ones that could correct the estimate.
        """
        stride_s = self.stride_s if in_strides and num_requests == 1 else None
        if stride_s is not None:
            stride_s = min(stride_s, self.base_s + self.row_s)
        return StepCosts(base_s=self.base_s, row_s=self.row_s * num_requests, draft_s=self.draft_s, stride_s=stride_s)
