"""What one engine takes for its work on this machine: the times that the simulated ones are given."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from statistics import median

from prometheus_client import CollectorRegistry

from vidspec_models.bundled.scene import TEST_SEEDS
from vidspec_models.request import GenerationRequest
from vidspec_service.bench.cluster.simulation import EngineTimes
from vidspec_service.bench.common.report import Tell
from vidspec_service.bench.common.samples import Sample, ask_engine, decoding
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, about_video, scene_video
from vidspec_service.engine.config import EngineConfig
from vidspec_service.engine.frontend.local_engine import LocalEngine
from vidspec_service.telemetry import Metrics

NUMBERS = (1, 2, 4, 8, 16)  # of answers at the same time
_TOKENS = 80
_WARM_UP = 2


def calibrate(config: EngineConfig, tell: Tell) -> EngineTimes:
    """Start the engine, ask it about rendered clips: alone, again, and several at once."""
    return asyncio.run(_calibrate(config, tell))


async def _calibrate(config: EngineConfig, tell: Tell) -> EngineTimes:
    steps = 3 + len(NUMBERS)
    tell("starting an engine", 0, steps)
    began = time.monotonic()
    async with LocalEngine(config, Metrics(CollectorRegistry())) as engine:
        start_s = time.monotonic() - began
        clips = range(NUMBERS[-1])
        for clip in range(_WARM_UP):
            await ask_engine(engine, _request(len(clips) + clip, "warm-up"))
        tell("prompts", 1, steps)
        new = [await ask_engine(engine, _request(clip, "new")) for clip in clips]
        tell("prompts again", 2, steps)
        again = [await ask_engine(engine, _request(clip, "again")) for clip in clips]
        rates = {}
        for step, number in enumerate(NUMBERS):
            tell(f"{number} at once", 3 + step, steps)
            asked = [_request(clip, f"{number} at once") for clip in clips[:number]]  # known, so that none prefills
            rates[number] = decoding(await asyncio.gather(*(ask_engine(engine, each) for each in asked))).rate
    return EngineTimes(
        prefill_s=median(map(_first_token_s, new)),
        prefill_again_s=median(map(_first_token_s, again)),
        rates=rates,
        start_s=start_s,
    )


def _request(clip: int, why: str) -> GenerationRequest:
    request = GenerationRequest(
        request_id=f"{why} {clip}",
        turns=about_video(CAPTION_PROMPT),
        videos=(scene_video(TEST_SEEDS[clip], key=f"clip {clip}"),),
        max_tokens=_TOKENS,
        ignore_eos=True,
    )
    return request if why != "again" else replace(request, turns=about_video("How many objects are there?"))


def _first_token_s(sample: Sample) -> float:
    return sample.first - sample.submitted
