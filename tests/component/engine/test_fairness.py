"""One caller's single request during another caller's flood, on real workers: its time to first token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.component.engine.harness import EngineHarness, ask
from vidspec_models.request import GenerationRequest
from vidspec_service.engine.types import TextDelta
from vidspec_service.errors import ContextLengthExceeded

pytestmark = [pytest.mark.component, pytest.mark.slow]

LONG = "What moves, and what stays where it is? " * 80  # 3 kB
PLACES = 14  # of 18: the share that the API gives to one of several callers


def asked(name: str, caller: str, text: str) -> GenerationRequest:
    return replace(ask(name, text, []), caller=caller)


async def first_token_s(harness: EngineHarness, request: GenerationRequest) -> float:
    began = time.monotonic()
    async with aclosing(harness.engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, TextDelta) and event.num_tokens:
                return time.monotonic() - began
    raise AssertionError("no token came")


def behind(harness: EngineHarness, flood: Sequence[GenerationRequest], lone: GenerationRequest) -> float:
    """Time to the first token of `lone`, sent a moment after all of `flood`, in seconds."""

    async def consume(request: GenerationRequest) -> None:
        async with aclosing(harness.engine.generate(request)) as events:
            async for _ in events:
                pass

    async def scenario() -> float:
        running = [asyncio.create_task(consume(request)) for request in flood]
        await asyncio.sleep(0.2)
        seconds = await first_token_s(harness, lone)
        for task in running:
            task.cancel()
        ends = await asyncio.gather(*running, return_exceptions=True)
        expected = (asyncio.CancelledError, ContextLengthExceeded, type(None))
        assert all(isinstance(end, expected) for end in ends), ends
        return seconds

    return harness.run(scenario())


def test_a_lone_prompt_does_not_wait_for_a_flood_of_long_ones(engine: EngineHarness) -> None:
    text = LONG[:1000]
    alone_s = max(engine.run(first_token_s(engine, asked(f"alone {n}", "modest", text))) for n in range(3))
    chunk_s = max(engine.run(first_token_s(engine, asked(f"chunk {n}", "modest", LONG[: 512 * 4]))) for n in range(2))
    flood = [asked(f"flood {number}", "greedy", f"{number} {LONG}") for number in range(PLACES)]
    behind_s = behind(engine, flood, asked("lone", "modest", text))
    print(f"alone {alone_s:.2f} s, one chunk {chunk_s:.2f} s, behind a flood {behind_s:.2f} s")  # noqa: T201
    assert behind_s < 3 * alone_s + chunk_s + 1.0  # 1.0 allows for other work on this machine


def test_texts_that_are_refused_in_the_end_hold_nobody_up(engine: EngineHarness) -> None:
    flood = [asked(f"emoji {number}", "greedy", "\U0001f3a5" * 200_000) for number in range(4)]
    behind_s = behind(engine, flood, asked("neighbour", "modest", "What moves?"))
    print(f"behind refused texts {behind_s:.2f} s")  # noqa: T201
    assert behind_s < 2.0
