"""Two workers load, measure one device, and ask for and get their KV budgets; only the device is a fake."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import cast

import anyio
import msgspec
import pytest
import torch
from prometheus_client import CollectorRegistry

from vidspec_models.request import GenerationRequest, Turn
from vidspec_models.synthetic.recipe import Recipe, prompt_text
from vidspec_service.engine import worker_main
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.engine.frontend.supervisor import WorkerLauncher
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed
from vidspec_service.engine.ipc.messages import Configure
from vidspec_service.engine.kv_budget import DeviceMemory, WorkerMemory
from vidspec_service.engine.types import Finished
from vidspec_service.engine.worker import memory
from vidspec_service.telemetry import Metrics

TOTAL, USED, ACTIVATIONS, TOKEN_BYTES = 1_000_000, 100_000, 50_000, 100
ROOM = (900_000 - USED - 2 * ACTIVATIONS) // (2 * TOKEN_BYTES)


class Threads:
    """Starts workers as threads of this process, in which the device that they measure can be replaced."""

    def __init__(self) -> None:
        msgspec.msgpack.Decoder(GenerationRequest)  # msgspec crashes if two threads do this first at once
        self.threads: list[threading.Thread] = []

    def launch(self, channel_fd: int) -> None:
        thread = threading.Thread(target=self._work, args=(os.dup(channel_fd),), daemon=True)
        thread.start()
        self.threads.append(thread)

    def _work(self, fd: int) -> None:
        channel = Channel.from_fd(fd)
        with suppress(ChannelClosed):
            worker_main._serve(channel, worker_main._receive(channel, Configure, 30.0))
        channel.close()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    def measured(model: object, config: EngineConfig) -> WorkerMemory:
        device = DeviceMemory(
            device="cuda:0", total=TOTAL, free=TOTAL - USED, weights=0, activations=ACTIVATIONS,
            token_bytes=TOKEN_BYTES,
        )  # fmt: skip
        return WorkerMemory(context=config.max_context or 1024, measured_at=time.monotonic(), devices=(device,))

    monkeypatch.setattr(memory, "measure_memory", measured)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # it would change this process, too
    for role in ("target", "draft"):
        Recipe(pair="tiny", role=role).write(tmp_path / role)
    # float32: to load another dtype, transformers sets it for the whole process, and two threads would do so at once.
    roles = ("target", "draft")
    target, draft = (WorkerConfig(model=str(tmp_path / role), device="cpu", dtype="float32") for role in roles)
    return EngineConfig(target=target, draft=draft, prefill_chunk=32)


def test_both_are_granted_what_fits_and_answer_within_it(pair: EngineConfig) -> None:
    launcher = Threads()

    async def answered() -> None:
        async with LocalEngine(pair, Metrics(CollectorRegistry()), launcher=cast(WorkerLauncher, launcher)) as engine:
            info = engine.info
            assert set(info.kv_cache_tokens) == {"target", "draft"}
            assert all(ROOM - 512 < tokens <= ROOM for tokens in info.kv_cache_tokens.values())  # whole blocks
            assert info.context_length == 1024
            assert info.memory["target"].devices[0].total == TOTAL
            asked = (Turn(role="user", parts=(prompt_text(0),)),)
            events = [
                each async for each in engine.generate(GenerationRequest(request_id="r", turns=asked, max_tokens=4))
            ]
            assert isinstance(events[-1], Finished)

    anyio.run(answered)
    for thread in launcher.threads:
        thread.join(10)
        assert not thread.is_alive()
