"""The run of `bench speed`, with contenders that do not answer."""

from __future__ import annotations

import asyncio

import pytest

from vidspec_models.request import GenerationRequest
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.speed.options import Mode, SpeedOptions
from vidspec_service.bench.speed.run import Contender, Run
from vidspec_service.errors import GenerationFailed


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_answer_that_fails_ends_the_run_with_its_own_error(concurrency: int) -> None:
    async def answer(request: GenerationRequest) -> Sample:
        if not request.request_id.startswith("off--1-"):  # the warm-up
            raise GenerationFailed("It failed.")
        return Sample(ids=(1,), prompt_tokens=1, submitted=0.0, times=(1.0,))

    run = Run(SpeedOptions(num_prompts=4, concurrency=concurrency, modes=(Mode.OFF,)), lambda *_: None)
    run.contenders[Mode.OFF] = Contender(answer, pids=list)
    with pytest.raises(GenerationFailed, match="It failed"):
        asyncio.run(run.measure([Mode.OFF]))
