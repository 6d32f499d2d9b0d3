"""What runs in child processes of `bench speed`: timed forwards, a device's bandwidth, an echo."""

from __future__ import annotations

import dataclasses
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

from vidspec_models.loading.spec import ModelSpec
from vidspec_service.bench.common.facts import Placement
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed, wait_readable
from vidspec_service.engine.ipc.messages import Proposal, Verdict

_REPEATS = 60
_ROOM = 4  # rows behind the context: a stride
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards(Placement):
    """One model as probed on its own: median seconds of a forward over n rows, token choice included, as in a step."""

    threads: int
    seconds: dict[int, float]
    stride_s: float | None = None  # a token of several that are made in one go, where the model does that

    @property
    def token_s(self) -> float:
        """What a token takes where nobody proposes any."""
        return self.seconds[1] if self.stride_s is None else self.stride_s


def time_forwards(spec: ModelSpec, threads: int, context: int, rows: tuple[int, ...]) -> Forwards:
    """With `context` rows in the cache."""
    import torch

    from vidspec_models.decoder.kv_cache import KVCache
    from vidspec_models.loading.load_model import load_model
    from vidspec_models.reference.measure import time_steps, time_strides

    torch.set_num_threads(threads)
    model = load_model(spec)
    model.use_when_alone(threads)
    context = min(context, model.context_length - max(*rows, _ROOM))
    cache = KVCache(model.decoder.geometry, context + max(*rows, _ROOM))
    return Forwards(
        threads=threads,
        seconds=time_steps(model, cache, context, rows, _REPEATS),
        stride_s=time_strides(model, cache, context),
        **dataclasses.asdict(Placement.of(model)),
    )


class BusyDraft:
    """A draft that makes tokens, as many at once as it does in the engine, until its process ends."""

    def __init__(self, spec: ModelSpec, threads: int, context: int) -> None:
        import torch

        from vidspec_models.decoder.kv_cache import KVCache
        from vidspec_models.loading.load_model import load_model
        from vidspec_models.request import SamplingParams
        from vidspec_models.sampling import CoupledSampler
        from vidspec_models.video_lm import StepRows
        from vidspec_service.engine.draft.request import MOST_AT_ONCE

        torch.set_num_threads(threads)
        model = load_model(spec)
        context = min(context, model.context_length - MOST_AT_ONCE)
        cache = KVCache(model.decoder.geometry, context + MOST_AT_ONCE)
        rows, greedy = StepRows(cache=cache, ids=[0], position=context), CoupledSampler(SamplingParams())

        def make_tokens() -> None:
            while True:
                cache.length = context
                model.guess([(rows, greedy, [])], MOST_AT_ONCE)

        self._thread = Thread(target=make_tokens, daemon=True)
        self._thread.start()

    def is_at_work(self) -> bool:
        """False once an error has ended it; its process has printed which."""
        return self._thread.is_alive()


def time_model(spec: ModelSpec, threads: int, context: int, rows: tuple[int, ...]) -> tuple[Forwards, float]:
    """A model's forwards, and the copies of its device (of several, one reads at a time): one process for both.

    Copies as bytes per second, read and written ones together, of the best of several large ones.
    """
    import torch

    from vidspec_models.reference.measure import time_copies

    forwards = time_forwards(spec, threads, context, rows)
    return forwards, time_copies(torch.device(forwards.device.partition(",")[0]))


def echo(sock: socket.socket) -> None:
    """The far end of the channel round trip: a Verdict for every Proposal, until the channel closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    channel = Channel(sock)
    with suppress(ChannelClosed):
        while True:
            wait_readable([channel], _PATIENCE_S)
            while (received := channel.receive()) is not None:
                if isinstance(asked := received[0], Proposal):
                    channel.send(Verdict(request_id=asked.request_id, start=asked.start, ids=asked.ids, max_lead=16))
