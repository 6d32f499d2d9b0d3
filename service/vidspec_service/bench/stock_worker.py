"""Child process of the `hf` mode: stock `generate` on the target, all cores, one request after another."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from vidspec_models.spec import ModelSpec
from vidspec_service.bench.child import serve

if TYPE_CHECKING:
    from vidspec_models.stock import StockGenerator
    from vidspec_models.synthetic_stock import RandomStock


class StockLoad(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Comes first, once."""

    spec: ModelSpec
    threads: int


class StockRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One generation; conversation and frames lie in the payload that comes with it."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


class StockReply(msgspec.Struct, frozen=True, kw_only=True):
    """Empty after loading; times are of the monotonic clock."""

    ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    token_times: tuple[float, ...] = ()


class _Peer:
    def __init__(self) -> None:
        self._generator: StockGenerator | RandomStock | None = None

    def __call__(self, message: StockLoad | StockRequest, fds: list[int]) -> StockReply:
        if isinstance(message, StockLoad):
            self._generator = _load(message)
            return StockReply()
        assert self._generator is not None
        return _generate(self._generator, message, fds[0])


def _load(message: StockLoad) -> StockGenerator | RandomStock:
    import torch

    from vidspec_models.synthetic_stock import load_stock

    torch.set_num_threads(message.threads)
    return load_stock(message.spec)


def _generate(generator: StockGenerator | RandomStock, request: StockRequest, payload_fd: int) -> StockReply:
    from vidspec_models.token_sampling import SamplingLaw
    from vidspec_service.engine.conversion import model_inputs
    from vidspec_service.engine.payload import read_payload

    law = SamplingLaw(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, seed=request.seed)
    turns, videos = model_inputs(*read_payload(payload_fd))
    found = generator.answer(turns, videos, request.max_tokens, law)
    return StockReply(ids=found.ids, prompt_tokens=found.prompt_tokens, token_times=found.token_times)


if __name__ == "__main__":
    sys.exit(serve(int(sys.argv[1]), msgspec.msgpack.Decoder(StockLoad | StockRequest), _Peer()))
