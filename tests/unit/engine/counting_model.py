"""CountingModel: the part of a VideoLM that the loops use. Token t + 1 follows t; a prompt's ids are its text bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vidspec_models.core_share import CoreShare
from vidspec_models.decoder.kv_cache import CacheGeometry, KVCache
from vidspec_models.encoder_cache import EncoderCache
from vidspec_models.prompt import Prompt
from vidspec_models.request import GenerationRequest, Reasoning, Turn, Video
from vidspec_models.sampling import CoupledSampler, DraftToken
from vidspec_models.video_lm import StepRows
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.draft.loop import DraftLoop
from vidspec_service.engine.frontend.workers import configure_messages
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed
from vidspec_service.engine.ipc.messages import Configure, Generate
from vidspec_service.engine.ipc.payload import close_fds, write_request
from vidspec_service.engine.target.loop import TargetLoop

VOCABULARY = 256
CELLS = 4 * 36


class CountingModel:
    """Every prompt has a video of the same size before its text; tests may replace `prefill` by one that fails."""

    context_length = 1000
    stop_ids: frozenset[int] = frozenset()
    has_kernels = False
    is_chunk_invariant = False
    vocabulary_size = 256  # a token is a byte

    class decoder:
        geometry = CacheGeometry(
            num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu"), context_block=8
        )
        embedding = torch.zeros(1)
        scale = 1.0
        cores = CoreShare()

    def prepare(self, turns: Sequence[Turn], videos: Sequence[Video], encoded: EncoderCache, *_: object) -> Prompt:
        ids = (0,) * CELLS + tuple(turns[-1].text.encode())
        rows = torch.arange(float(len(ids))).view(-1, 1, 1)
        return Prompt(
            ids=ids,
            embeddings=torch.zeros(len(ids), 4),
            rotary=(rows, rows),
            is_video=torch.arange(len(ids)) < CELLS,
            next_position=len(ids),
            grid=torch.cartesian_prod(torch.arange(4), torch.arange(6), torch.arange(6)),
        )

    def reasoning_after(self, *_: object) -> Reasoning:
        return Reasoning.NONE

    def prefill(self, prompt: Prompt, cache: KVCache, num_rows: int, observer: Any = None) -> Tensor | None:
        cache.length += num_rows
        return self._after(prompt.ids[-1:])[0] if cache.length >= prompt.num_tokens else None

    def step(self, batch: Sequence[StepRows]) -> list[Tensor]:
        for rows in batch:
            rows.cache.length += len(rows.ids)
        return [self._after(rows.ids) for rows in batch]

    def propose(
        self, batch: Sequence[tuple[StepRows, CoupledSampler, Sequence[int]]], most: int
    ) -> list[list[DraftToken]]:
        return [[DraftToken(int(scores[-1].argmax()), 0.9)] for scores in self.step([rows for rows, _, _ in batch])]

    def _after(self, ids: Sequence[int]) -> Tensor:
        return torch.nn.functional.one_hot((torch.tensor(ids) + 1) % VOCABULARY, VOCABULARY).float()


def configure(role: str, **engine: Any) -> Configure:
    """The message that the API would send, for a pair that is never loaded."""
    nobody = WorkerConfig(model="of/none")
    # No token is held back after its forward.
    engine = {"stream_interval_s": 0.0, "draft": nobody, "kv_cache_tokens": 65536, **engine}
    pair = EngineConfig(target=nobody, **engine)
    return next(each for each in configure_messages(pair) if each.role == role)


def submit(api: Channel, request: GenerationRequest) -> None:
    """Send a request as the API does."""
    payload = write_request(request)
    for index in range(request.n):
        name = request.choice(index).request_id
        api.send(Generate(request_id=name, choice=index), payload)
    close_fds(payload)


class Running:
    """Runs the loop in a thread until the block ends. `error` is the exception that ended it, except ChannelClosed."""

    def __init__(self, loop: TargetLoop | DraftLoop, api: Channel) -> None:
        self.error: Exception | None = None
        self._loop = loop
        self._api = api
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._api.close()
        self.wait()

    def wait(self) -> None:
        self._thread.join(20)

    def _run(self) -> None:
        try:
            self._loop.run()
        except ChannelClosed:
            pass
        except Exception as error:
            self.error = error
