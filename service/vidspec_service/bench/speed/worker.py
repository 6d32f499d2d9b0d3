"""Child processes of `bench speed`: stock `generate`, timed forwards, bandwidth, or the channel's far end.

`python -m ... FD` answers the messages below; `python -m ... FD echo` answers every Proposal with a Verdict.
"""

from __future__ import annotations

import signal
import socket
import statistics
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from vidspec_models.spec import ModelSpec
from vidspec_service.bench.common.child import serve
from vidspec_service.bench.common.facts import Placement
from vidspec_service.engine.channels import Channel, ChannelClosed, wait_readable
from vidspec_service.engine.messages import Proposal, Verdict
from vidspec_service.engine.types import SamplingParams

if TYPE_CHECKING:
    from vidspec_models.stock import StockGenerator
    from vidspec_models.synthetic_stock import RandomStock

_WARM_UP = 5
_COPIES = 12
_PATIENCE_S = 60.0


class StockLoad(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stock transformers' target; comes first, once."""

    spec: ModelSpec
    threads: int


class StockRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One generation; conversation and frames lie in the payload that comes with it."""

    max_tokens: int
    sampling: SamplingParams


class StockReply(msgspec.Struct, frozen=True, kw_only=True):
    """Empty after loading; times are of the monotonic clock."""

    ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    token_times: tuple[float, ...] = ()


class ForwardsRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Which model on how many threads, and which forwards."""

    spec: ModelSpec
    threads: int
    context: int  # rows in the cache before each forward
    rows: tuple[int, ...]
    repeats: int


class Forwards(Placement, frozen=True, kw_only=True):
    """One model as probed on its own: median seconds of a forward over n rows, token choice included, as in a step."""

    threads: int
    seconds: dict[int, float]


class BandwidthRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A device as `Forwards.device` names it, and how much to copy: far more than its caches hold."""

    device: str
    num_bytes: int
    threads: int


class BandwidthReply(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second, read and written ones together; the best of several copies."""

    bytes_per_s: float


Request = StockLoad | StockRequest | ForwardsRequest | BandwidthRequest


class _Peer:
    def __init__(self) -> None:
        self._generator: StockGenerator | RandomStock | None = None

    def __call__(self, message: Request, fds: list[int]) -> StockReply | Forwards | BandwidthReply:
        match message:
            case StockLoad():
                self._generator = _load_stock(message)
                return StockReply()
            case StockRequest():
                assert self._generator is not None
                return _generate(self._generator, message, fds[0])
            case ForwardsRequest():
                return time_forwards(message)
            case BandwidthRequest():
                return _copy(message)


def _load_stock(message: StockLoad) -> StockGenerator | RandomStock:
    import torch

    from vidspec_models.synthetic_stock import load_stock

    torch.set_num_threads(message.threads)
    return load_stock(message.spec)


def _generate(generator: StockGenerator | RandomStock, request: StockRequest, payload_fd: int) -> StockReply:
    from vidspec_models.token_sampling import SamplingLaw
    from vidspec_service.engine.conversion import model_inputs
    from vidspec_service.engine.payload import read_payload

    params = request.sampling
    law = SamplingLaw(temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, seed=params.seed)
    turns, videos = model_inputs(*read_payload(payload_fd))
    found = generator.answer(turns, videos, request.max_tokens, law)
    return StockReply(ids=found.ids, prompt_tokens=found.prompt_tokens, token_times=found.token_times)


def time_forwards(request: ForwardsRequest) -> Forwards:
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
    return Forwards(
        threads=request.threads,
        seconds={num_rows: statistics.median(measured) for num_rows, measured in times.items()},
        **msgspec.structs.asdict(Placement.of(model)),
    )


def _copy(request: BandwidthRequest) -> BandwidthReply:
    """A large copy, which reads every byte and writes it once, again and again."""
    import torch

    torch.set_num_threads(request.threads)
    source = torch.ones(request.num_bytes, dtype=torch.uint8, device=request.device)
    copy = torch.empty_like(source)

    def copied_s() -> float:
        started = time.perf_counter()
        copy.copy_(source)
        if copy.is_cuda:
            torch.cuda.synchronize(copy.device)
        return time.perf_counter() - started

    best = min([copied_s() for _ in range(_COPIES)][1:])
    return BandwidthReply(bytes_per_s=2 * request.num_bytes / best)


def _echo(fd: int) -> int:
    """Until the channel closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    channel = Channel(socket.socket(fileno=fd))
    try:
        while True:
            wait_readable([channel], _PATIENCE_S)
            while (received := channel.receive()) is not None:
                message = received[0]
                if isinstance(message, Proposal):
                    channel.send(Verdict(request_id=message.request_id, start=message.start, ids=message.ids, room=16))
    except ChannelClosed:
        return 0


if __name__ == "__main__":
    _fd = int(sys.argv[1])
    sys.exit(_echo(_fd) if sys.argv[2:] == ["echo"] else serve(_fd, msgspec.msgpack.Decoder(Request), _Peer()))
