"""Child process that times one model's forwards: n rows at a given context, token choice included, as in a step."""

from __future__ import annotations

import statistics
import sys
import time

import msgspec

from vidspec_models.spec import ModelSpec
from vidspec_service.bench.child import serve

_WARM_UP = 5


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which model on how many threads, and which forwards."""

    spec: ModelSpec
    threads: int
    context: int  # rows in the cache before each forward
    rows: tuple[int, ...]
    repeats: int


class ProbeReply(msgspec.Struct, frozen=True, kw_only=True):
    """Median seconds, in the order of `rows`, and where the model ran."""

    seconds: tuple[float, ...]
    device: str
    device_name: str  # of the accelerator; empty on CPU
    dtype: str
    rows_are_invariant: bool


def probe(request: ProbeRequest, _: list[int]) -> ProbeReply:
    """Load and time. The row counts take turns, so that a disturbance meets all of them."""
    import torch

    from vidspec_models.kv_cache import KVCache
    from vidspec_models.loading import load_model
    from vidspec_models.token_sampling import CoupledSampler, SamplingLaw
    from vidspec_models.video_lm import StepRows

    torch.set_num_threads(request.threads)
    model = load_model(request.spec)
    context = min(request.context, model.context_length - max(request.rows))
    cache = KVCache(model.decoder.geometry, context + max(request.rows))
    sampler = CoupledSampler(SamplingLaw())
    times: dict[int, list[float]] = {num_rows: [] for num_rows in request.rows}
    for turn in range(_WARM_UP + request.repeats):
        for num_rows, measured in times.items():
            cache.length = context
            started = time.perf_counter()
            logits = model.step([StepRows(cache=cache, ids=[0] * num_rows, position=context)])
            sampler.choose(logits[0], 0)
            if turn >= _WARM_UP:
                measured.append(time.perf_counter() - started)
    geometry = model.decoder.geometry
    is_cuda = geometry.device.type == "cuda"
    return ProbeReply(
        seconds=tuple(statistics.median(measured) for measured in times.values()),
        device=geometry.device_names,
        device_name=torch.cuda.get_device_name(geometry.device) if is_cuda else "",
        dtype=str(geometry.dtype).removeprefix("torch."),
        rows_are_invariant=model.decoder.row_rule.holds,
    )


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), msgspec.msgpack.Decoder(ProbeRequest), probe))
