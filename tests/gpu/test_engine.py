"""An engine of two random models on one GPU: eight concurrent requests, in all modes, and with a killed worker."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from vidspec_service.bench.common.generation import generate_sample
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.speed.options import Mode, SpeedOptions
from vidspec_service.bench.speed.synthetic import RandomPair
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.settings import Settings, engine_config
from vidspec_service.telemetry import Metrics

SHAPE = "llava-onevision-7b-of-4-layers+0.5b"
OPTIONS = SpeedOptions(num_prompts=8, max_tokens=64, is_synthetic=True, shape=SHAPE)
_MOST_S = 120.0


async def answers(engine: LocalEngine, mode: Mode, number: int, killed: str = "") -> list[Sample]:
    """The answers to all prompts at once; `killed` names a worker to kill as soon as one prompt is answered."""
    requests = [OPTIONS.request(mode, number, prompt) for prompt in range(OPTIONS.num_prompts)]
    asked = [asyncio.create_task(generate_sample(engine, request)) for request in requests]
    await asyncio.wait(asked, timeout=_MOST_S, return_when=asyncio.FIRST_COMPLETED)
    if killed:
        pid = engine.worker_pids()[killed]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    samples = await asyncio.wait_for(asyncio.gather(*asked), _MOST_S)
    return [replace(sample, mode=mode, prompt=index) for index, sample in enumerate(samples)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_at_once_have_the_ids_of_the_target_alone_whoever_dies(tmp_path: Path) -> None:
    made = RandomPair(tmp_path, OPTIONS)
    pair = engine_config(Settings(log_level="warning"))
    assert pair.draft is not None
    pair = replace(pair, target=made.worker(pair.target, "target"), draft=made.worker(pair.draft, "draft"))

    async def run() -> None:
        async with LocalEngine(pair, Metrics(CollectorRegistry())) as engine:
            alone = await answers(engine, Mode.OFF, 0)
            made.write_references(alone)
            shared = await generate_sample(engine, OPTIONS.request(Mode.AUTO, 9, 0))
            assert shared.ids == alone[0].ids
            assert shared.speculation.num_accepted_tokens > 0, "its draft got no turn on the GPU before it ended"
            rounds = [(Mode.AUTO, ""), (Mode.SERIAL, ""), (Mode.PARALLEL, "draft"), (Mode.PARALLEL, "target")]
            for number, (mode, killed) in enumerate(rounds, 1):
                found = await answers(engine, mode, number, killed)
                assert [sample.ids for sample in found] == [sample.ids for sample in alone], (mode, killed)

    asyncio.run(run())
