"""Child process that measures a device's memory bandwidth: a large copy, which reads every byte and writes it once."""

from __future__ import annotations

import sys
import time

import msgspec

from vidspec_service.bench.child import serve

_REPEATS = 12


class BandwidthRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A device as `Forwards.device` names it, and how much to copy: far more than its caches hold."""

    device: str
    num_bytes: int
    threads: int


class BandwidthReply(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second, read and written ones together; the best of several copies."""

    bytes_per_s: float


def measure(request: BandwidthRequest, _: list[int]) -> BandwidthReply:
    """Copy again and again."""
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

    best = min([copied_s() for _ in range(_REPEATS)][1:])
    return BandwidthReply(bytes_per_s=2 * request.num_bytes / best)


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), msgspec.msgpack.Decoder(BandwidthRequest), measure))
