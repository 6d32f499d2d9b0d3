"""The time of a message there and back between two processes, over the channel that joins draft and target."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from vidspec_service.bench.child import end, spawn
from vidspec_service.engine.channels import Channel, wait_readable
from vidspec_service.engine.messages import Proposal, Verdict
from vidspec_service.errors import ConfigError

_WORKER = "vidspec_service.bench.echo_worker"
_WARM_UP = 200
_START_S, _ANSWER_S = 60.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """Percentiles over `num_exchanges`, in seconds."""

    p50_s: float
    p99_s: float
    num_exchanges: int


def measure_round_trip(num_exchanges: int = 2000) -> RoundTrip:
    """Proposal out, Verdict back, again and again; both sides sleep in `poll` between messages, as workers do."""
    process, sock = spawn(_WORKER)
    channel = Channel(sock)
    try:
        times = [_exchange(channel, position) for position in range(_WARM_UP + num_exchanges)][_WARM_UP:]
    finally:
        channel.close()
        end(process)
    p50, p99 = np.percentile(times, (50, 99))
    return RoundTrip(p50_s=float(p50), p99_s=float(p99), num_exchanges=num_exchanges)


def _exchange(channel: Channel, position: int) -> float:
    started = time.perf_counter()
    sent = Proposal(
        request_id="bench-00000000",
        epoch=1,
        start=position,
        ids=(position,),
        confidences=(0.5,),
        step_s=0.001,
        video_tokens=0,
    )
    channel.send(sent)
    wait_readable([channel], _ANSWER_S if position else _START_S)
    received = channel.receive()
    if received is None or not isinstance(received[0], Verdict):
        raise ConfigError(f"{_WORKER} did not answer")
    return time.perf_counter() - started
