"""What runs in child processes of `bench speed`: stock `generate`, timed forwards, a device's bandwidth, an echo."""

from __future__ import annotations

import dataclasses
import signal
import socket
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import GenerationRequest
from vidspec_service.bench.common.facts import Placement
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed, wait_readable
from vidspec_service.engine.ipc.messages import Proposal, Verdict

if TYPE_CHECKING:
    from vidspec_models.reference.stock import StockAnswer

_WARM_UP, _REPEATS = 5, 60
_COPIES = 12
_COPIED_BYTES = {"cuda": 2**30, "cpu": 2**27}  # far more than caches hold
_PATIENCE_S = 60.0


class Stock:
    """Stock transformers on the target."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        import torch

        from vidspec_models.reference.stock import load_stock

        torch.set_num_threads(threads)
        self._generator = load_stock(spec)

    def answer(self, request: GenerationRequest) -> StockAnswer:
        """One generation."""
        assert request.max_tokens is not None, "stock `generate` has no limit of its own"
        return self._generator.answer(request.turns, request.videos, request.max_tokens, request.sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards(Placement):
    """One model as probed on its own: median seconds of a forward over n rows, token choice included, as in a step."""

    threads: int
    seconds: dict[int, float]


def time_forwards(spec: ModelSpec, threads: int, context: int, rows: tuple[int, ...]) -> Forwards:
    """With `context` rows in the cache. The row counts take turns, so that a disturbance meets all of them."""
    import torch

    from vidspec_models.decoder.kv_cache import KVCache
    from vidspec_models.loading.load_model import load_model
    from vidspec_models.request import SamplingParams
    from vidspec_models.sampling.coupled import CoupledSampler
    from vidspec_models.video_lm import StepRows

    torch.set_num_threads(threads)
    model = load_model(spec)
    context = min(context, model.context_length - max(rows))
    cache = KVCache(model.decoder.geometry, context + max(rows))
    sampler = CoupledSampler(SamplingParams())
    times: dict[int, list[float]] = {num_rows: [] for num_rows in rows}
    for turn in range(_WARM_UP + _REPEATS):
        for num_rows, measured in times.items():
            cache.length = context
            started = time.perf_counter()
            logits = model.step([StepRows(cache=cache, ids=[0] * num_rows, position=context)])
            sampler.choose(logits[0], 0)
            if turn >= _WARM_UP:
                measured.append(time.perf_counter() - started)
    medians = {num_rows: statistics.median(measured) for num_rows, measured in times.items()}
    return Forwards(threads=threads, seconds=medians, **dataclasses.asdict(Placement.of(model)))


def time_copies(device: str, threads: int) -> float:
    """Bytes per second, read and written ones together, of the best of several large copies on a device."""
    import torch

    torch.set_num_threads(threads)
    num_bytes = _COPIED_BYTES[device.partition(":")[0]]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)

    def copied_s() -> float:
        started = time.perf_counter()
        copy.copy_(source)
        if copy.is_cuda:
            torch.cuda.synchronize(copy.device)
        return time.perf_counter() - started

    return 2 * num_bytes / min([copied_s() for _ in range(_COPIES)][1:])


def echo(sock: socket.socket) -> None:
    """The far end of the channel round trip: a Verdict for every Proposal, until the channel closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    channel = Channel(sock)
    try:
        while True:
            wait_readable([channel], _PATIENCE_S)
            while (received := channel.receive()) is not None:
                message = received[0]
                if isinstance(message, Proposal):
                    channel.send(
                        Verdict(request_id=message.request_id, start=message.start, ids=message.ids, max_lead=16)
                    )
    except ChannelClosed:
        return
