"""Speculation of one request on the target: its chain of proposals, its acceptance, its current plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from vidspec_models.kv_cache import KVCache
from vidspec_models.request import SpeculationMode
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.speculation.plan import OFF, Plan, StepCosts, best_plan
from vidspec_service.engine.speculation.proposals import ProposalChain

_MEMORY = 0.97  # weight of the past per judged token: about the last 30 count
_LEAST_GAIN_AUTO = 1.05
_MOST_DEMANDED = 0.9  # of probability
_FORWARDS_PER_PLAN = 4  # planning takes a twentieth of a small target's forward, and moves little from one to the next
_DECAY = 0.98  # of measured forwards, per forward
_PROBE_CONTEXT, _PROBE_ROWS, _PROBE_REPEATS = 500, (2, 10), 5


@dataclass(slots=True)
class Speculation:
    """Mode and measurements in, plan out; nothing sticky: every plan is made from current numbers."""

    mode: SpeculationMode
    acceptance: float
    chain: ProposalChain = field(default_factory=ProposalChain)
    plan: Plan = OFF
    num_told: int = 0  # committed tokens that the draft knows of
    is_followed: bool = False  # the draft has lately proposed something: worth waiting for
    draft_video_tokens: int = 0  # that the draft saw when it last proposed
    least_likely: float = 0.0  # a row is verified if what it stands on holds with this probability
    _num_served: int = 0  # forwards since the first plan

    def replan(self, costs: StepCosts) -> None:
        """Choose a plan for the next forwards; called before each, mostly the last choice stands."""
        if self.mode is SpeculationMode.OFF:
            return
        self._num_served += 1
        if self._num_served % _FORWARDS_PER_PLAN != 1:
            return
        least = _LEAST_GAIN_AUTO if self.mode is SpeculationMode.AUTO else 0.0
        overlap = self.mode is not SpeculationMode.SERIAL
        self.plan = best_plan(self.acceptance, costs, overlap=overlap, least_gain=least)
        # A row that comes true saves what a token takes otherwise, by this plan; a row of the forward is its price.
        self.least_likely = min(costs.row_s * self.plan.speedup / costs.verification_s(1), _MOST_DEMANDED)

    def observe(self, num_accepted: int, *, is_rejected: bool) -> None:
        """Fold one verification into the running acceptance rate."""
        for _ in range(num_accepted):
            self.acceptance = _MEMORY * self.acceptance + (1 - _MEMORY)
        if is_rejected:
            self.acceptance *= _MEMORY

    def drop(self) -> None:
        """The draft is gone: go on alone."""
        self.chain = ProposalChain()
        self.plan = OFF
        self.num_told = 0
        self.is_followed = False
        self._num_served = 0


class CostMeter:
    """Running estimate of a linear forward time, base + row * rows, and of the draft's pace."""

    def __init__(self, *, base_s: float, row_s: float, draft_s: float) -> None:
        self.base_s = base_s
        self.row_s = row_s
        self.draft_s = draft_s
        self._sums = [0.0] * 5  # of forwards, rows, rows², seconds, rows * seconds; old ones fade

    def observe(self, num_rows: int, seconds: float) -> None:
        """Least squares over recent forwards; needs some spread in the row counts to move the slope."""
        new = (1.0, num_rows, num_rows**2, seconds, num_rows * seconds)
        self._sums = [_DECAY * old + value for old, value in zip(self._sums, new, strict=True)]
        n, rows, rows2, time_s, rows_time_s = self._sums
        spread = n * rows2 - rows**2
        if spread > 0.5 * n**2:
            slope = (n * rows_time_s - rows * time_s) / spread
            self.row_s = min(max(slope, 0.0), time_s / rows)
        self.base_s = max(time_s / n - self.row_s * rows / n, 1e-6)

    def costs(self, num_requests: int) -> StepCosts:
        """As one of `num_requests` sharing each forward sees them."""
        return StepCosts(base_s=self.base_s, row_s=self.row_s * num_requests, draft_s=self.draft_s)


def measure_costs(model: VideoLM) -> CostMeter:
    """Time short forwards on a scratch cache, so that the first plan is not a guess."""
    cache = KVCache(model.decoder.geometry, _PROBE_CONTEXT + max(_PROBE_ROWS))
    times = []
    for num_rows in _PROBE_ROWS:
        best = float("inf")
        for _ in range(_PROBE_REPEATS):
            cache.length = _PROBE_CONTEXT
            started = time.perf_counter()
            (logits,) = model.step([StepRows(cache=cache, ids=[0] * num_rows, position=_PROBE_CONTEXT)])
            logits[-1, 0].item()  # an accelerator is not done before something is read
            best = min(best, time.perf_counter() - started)
        times.append(best)
    row_s = max((times[1] - times[0]) / (_PROBE_ROWS[1] - _PROBE_ROWS[0]), 0.0)
    base_s = max(times[0] - row_s * _PROBE_ROWS[0], 1e-6)
    return CostMeter(base_s=base_s, row_s=row_s, draft_s=base_s / 8)
