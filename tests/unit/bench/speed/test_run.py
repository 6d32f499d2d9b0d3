"""The run of `bench speed`, with backends that do not answer."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, nullcontext

import pytest

from tests.fakes import FakeEngine
from vidspec_models.request import GenerationRequest
from vidspec_service.bench.common.samples import Sample
from vidspec_service.bench.speed import run as module
from vidspec_service.bench.speed.options import Mode, SpeedOptions
from vidspec_service.bench.speed.run import Run
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.errors import GenerationFailed


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_answer_that_fails_ends_the_run_with_its_own_error(concurrency: int) -> None:
    async def answer(request: GenerationRequest) -> Sample:
        if not request.request_id.startswith("off--1-"):  # the warm-up
            raise GenerationFailed("It failed.")
        return Sample(ids=(1,), prompt_tokens=1, submitted=0.0, times=(1.0,))

    run = Run(SpeedOptions(num_prompts=4, concurrency=concurrency, modes=(Mode.OFF,)), lambda *_: None)
    run.backends[Mode.OFF] = answer
    with pytest.raises(GenerationFailed, match="It failed"):
        asyncio.run(run.measure([Mode.OFF]))


def test_a_run_that_ctrl_c_ends_has_asked_every_mode_about_the_same_prompts() -> None:
    async def answer(request: GenerationRequest) -> Sample:
        if request.request_id.startswith("serial-1-"):
            signal.raise_signal(signal.SIGINT)
        return Sample(ids=(1,), prompt_tokens=1, submitted=0.0, times=(1.0,))

    modes = (Mode.OFF, Mode.SERIAL, Mode.PARALLEL)
    run = Run(SpeedOptions(num_prompts=9, modes=modes), lambda *_: None)
    run.backends = dict.fromkeys(modes, answer)
    asyncio.run(run.measure(modes))
    assert sorted((sample.prompt, sample.mode) for sample in run.samples) == [
        (prompt, mode) for prompt in range(2) for mode in sorted(modes)
    ]
    assert run.options.num_prompts == 2  # of the report, and of the modes of the next phase


@pytest.mark.parametrize(("draft", "roles"), [("bundled", ("target", "draft")), ("ngram", ("target",))])
def test_no_heartbeat_is_waited_for_of_a_draft_without_a_worker(
    monkeypatch: pytest.MonkeyPatch, draft: str, roles: tuple[str, ...]
) -> None:
    monkeypatch.setattr(module, "new_engine", lambda *_, **__: nullcontext(FakeEngine()))
    pair = EngineConfig(target=WorkerConfig(model="bundled"), draft=WorkerConfig(model=draft))

    async def started() -> Run:
        run = Run(SpeedOptions(), lambda *_: None)
        async with AsyncExitStack() as stack:
            await run.start_backends(stack, (Mode.OFF, Mode.PARALLEL), pair)
        return run

    activities = asyncio.run(started()).activities
    assert (activities[Mode.OFF].roles, activities[Mode.PARALLEL].roles) == (("target",), roles)
