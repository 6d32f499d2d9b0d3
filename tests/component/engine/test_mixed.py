"""Eight requests of eight kinds at once, in all modes: each gets the answer it gets alone without a draft."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from tests.component.engine.harness import EngineHarness, ask, scene_video, unsure_video
from tests.component.engine.test_grammar import JSON, REGEX, check
from vidspec_models.request import GenerationRequest, SamplingParams, SpeculationMode, Video
from vidspec_service.engine.types import Finished, TextDelta, TokenLogprob

MODES = (SpeculationMode.OFF, SpeculationMode.SERIAL, SpeculationMode.PARALLEL, SpeculationMode.AUTO)

Told = list[tuple[tuple[int, ...], tuple[TokenLogprob, ...], str]]  # for each answer: ids, log probabilities, text


def kinds(temperature: float) -> dict[str, GenerationRequest]:
    def request(kind: str, videos: Sequence[Video], law: dict[str, Any] | None = None, **others: Any) -> None:
        sampling = SamplingParams(temperature=temperature, seed=len(found), **law or {})
        asked = ask(kind, "Describe the video.", videos, sampling=sampling, max_tokens=60)
        found[kind] = replace(asked, **others)

    found: dict[str, GenerationRequest] = {}
    request("plain", [unsure_video(1)])
    request("schema", [scene_video(1)], grammar=JSON, max_tokens=250)
    request("regex", [scene_video(2)], grammar=REGEX)
    request("logprobs", [unsure_video(2)], logprobs=5)
    request("penalties", [scene_video(3)], {"presence_penalty": 0.8, "frequency_penalty": 0.5})
    request("bias", [scene_video(4)], {"logit_bias": ((531, -100.0), (577, 3.0)), "repetition_penalty": 1.2})
    request("n", [unsure_video(3)], n=3)
    request("two videos", [scene_video(5), unsure_video(4)])
    return found


async def told(engine: EngineHarness, request: GenerationRequest) -> Told:
    found: Told = [((), (), "")] * request.n
    num_ended = 0
    async with aclosing(engine.engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                ids, logprobs, text = found[event.choice]
                found[event.choice] = (ids + event.ids, logprobs + event.logprobs, text + event.text)
            num_ended += isinstance(event, Finished)
    assert num_ended == request.n
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_kinds_at_once_in_all_modes_are_answered_as_each_alone(engine: EngineHarness, temperature: float) -> None:
    asked = kinds(temperature)
    alone = {
        kind: engine.run(told(engine, replace(each, request_id=f"{kind} alone {temperature}", speculation=MODES[0])))
        for kind, each in asked.items()
    }
    check("schema", alone["schema"][0][2])
    check("regex", alone["regex"][0][2])
    assert len(alone["logprobs"][0][1]) == len(alone["logprobs"][0][0])

    async def together(shift: int) -> list[Told]:
        named = [
            replace(each, request_id=f"{kind} {shift} {temperature}", speculation=MODES[(place + shift) % 4])
            for place, (kind, each) in enumerate(asked.items())
        ]
        return await asyncio.gather(*(told(engine, each) for each in named))

    for shift in range(4):  # each kind in each mode
        assert dict(zip(asked, engine.run(together(shift)), strict=True)) == alone
