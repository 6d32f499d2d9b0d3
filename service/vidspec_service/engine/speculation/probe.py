"""What the target's forwards cost, timed once at load, so that the first plan is not a guess."""

from __future__ import annotations

import time

from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.request import SamplingParams
from vidspec_models.sampling import CoupledSampler
from vidspec_models.video_lm import StepRows, VideoLM
from vidspec_service.engine.speculation.plan import CostMeter

_PROBE_CONTEXT, _PROBE_ROWS, _PROBE_STRIDE, _PROBE_REPEATS = 500, (2, 10), 4, 5


def measure_costs(model: VideoLM) -> CostMeter:
    """Time short forwards on a scratch cache."""
    cache = KVCache(model.decoder.geometry, _PROBE_CONTEXT + max(_PROBE_ROWS))
    times = []
    for num_rows in _PROBE_ROWS:
        best = float("inf")
        for _ in range(_PROBE_REPEATS):
            cache.length = _PROBE_CONTEXT
            started = time.perf_counter()
            (logits,) = model.step([StepRows(cache=cache, ids=[0] * num_rows, position=_PROBE_CONTEXT)])
            logits[-1, 0].item()  # an accelerator may not be done before something is read
            best = min(best, time.perf_counter() - started)
        times.append(best)
    row_s = max((times[1] - times[0]) / (_PROBE_ROWS[1] - _PROBE_ROWS[0]), 0.0)
    base_s = max(times[0] - row_s * _PROBE_ROWS[0], 1e-6)
    return CostMeter(base_s=base_s, row_s=row_s, stride_s=_stride_s(model, cache))


def _stride_s(model: VideoLM, cache: KVCache) -> float | None:
    """Seconds per token where several are decoded in one call; None if the model cannot do that."""
    rows, greedy = StepRows(cache=cache, ids=[0], position=_PROBE_CONTEXT), CoupledSampler(SamplingParams())
    best = float("inf")
    for _ in range(_PROBE_REPEATS):
        cache.length = _PROBE_CONTEXT
        started = time.perf_counter()
        if not model.decode(rows, greedy, [], _PROBE_STRIDE):
            return None
        best = min(best, (time.perf_counter() - started) / _PROBE_STRIDE)
    return best
