"""Several answers to one prompt: each equals its seed's single answer, in every mode; the prompt is computed once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import EngineHarness, ask, unsure_video
from vidspec_models.request import Compression, GenerationRequest, SamplingParams, SpeculationMode, Video
from vidspec_service.engine.ipc.messages import Heartbeat
from vidspec_service.engine.types import Finished, TextDelta

MODES = (SpeculationMode.OFF, SpeculationMode.SERIAL, SpeculationMode.PARALLEL, SpeculationMode.AUTO)
SEED = 2**64 - 2  # two below the largest: the third answer has seed 0

Ids = tuple[int, ...]


def several(
    name: str, n: int, temperature: float = 1.5, mode: SpeculationMode = MODES[0], videos: Sequence[Video] | None = None
) -> GenerationRequest:
    sampling = SamplingParams(temperature=temperature, seed=SEED)
    shown = [unsure_video(1, 2)] if videos is None else videos
    request = ask(name, "Describe the video.", shown, sampling=sampling, speculation=mode)
    return replace(request, n=n)


def alone(engine: EngineHarness, request: GenerationRequest) -> list[Ids]:
    """The expected answers: the request with each seed, on its own, without speculation."""
    found = []
    for index in range(request.n):
        sampling = replace(request.sampling, seed=(request.sampling.seed + index) % 2**64)
        name = f"{request.request_id} alone {index}"
        one = replace(request, request_id=name, n=1, sampling=sampling, speculation=MODES[0])
        found.append(engine.answer(one).ids)
    return found


async def choices(
    engine: EngineHarness, request: GenerationRequest, on_event: Callable[[TextDelta], None] = lambda _: None
) -> list[Ids]:
    found: list[Ids] = [()] * request.n
    ended: list[int] = []
    async with aclosing(engine.engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                assert event.choice not in ended
                found[event.choice] += event.ids
                on_event(event)
            elif isinstance(event, Finished):
                ended.append(event.choice)
    assert sorted(ended) == list(range(request.n))
    return found


async def texts(engine: EngineHarness, request: GenerationRequest) -> list[str]:
    found = [""] * request.n

    def note(event: TextDelta) -> None:
        found[event.choice] += event.text

    await choices(engine, request, note)
    return found


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.5])
def test_each_answer_is_the_one_of_its_seed_in_every_mode(engine: EngineHarness, temperature: float) -> None:
    asked = several(f"modes {temperature}", 3, temperature)
    expected = alone(engine, asked)
    assert len(set(expected)) == (1 if temperature == 0 else 3)
    for mode in MODES:
        assert engine.run(choices(engine, replace(asked, request_id=f"{mode} {temperature}", speculation=mode))) == (
            expected
        )


def test_a_video_of_nobody_else_and_a_text_alone_are_computed_once(
    engine: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the rows of the target's forwards from its heartbeats; every token but the last has one row."""
    beats: asyncio.Queue[Heartbeat] = asyncio.Queue()

    def note(role: str, beat: Heartbeat) -> None:
        if role == "target":
            beats.put_nowait(beat)

    async def rows_of(request: GenerationRequest) -> tuple[int, int]:
        began, num_rows = time.monotonic(), 0
        found = await choices(engine, request)
        ended, until = time.monotonic(), 0.0
        while until < ended:
            beat = await beats.get()
            until, num_rows = beat.until, num_rows + sum(rows for start, _, rows in beat.forwards if start > began)
        return num_rows, sum(len(ids) - 1 for ids in found)

    monkeypatch.setattr(engine.engine, "_on_heartbeat", note)
    for name, videos in (("once", [unsure_video(3)]), ("text", [])):
        asked = replace(several(f"{name} 4", 4, videos=videos), max_tokens=12)
        num_prompt = engine.answer(replace(asked, request_id=f"{name} 1", n=1, max_tokens=1)).started.prompt_tokens
        num_rows, num_decoded = engine.run(rows_of(asked))
        assert num_rows == num_prompt + num_decoded


def test_a_stop_string_ends_its_own_answer_only(engine: EngineHarness) -> None:
    asked = several("whole", 3, videos=[unsure_video(1)])
    whole = engine.run(texts(engine, asked))
    stop = next(word for word in whole[0].split() if any(word not in text for text in whole))
    stopped = engine.run(texts(engine, replace(asked, request_id="stopped", stop=(stop,))))
    assert stopped == [text.partition(stop)[0] for text in whole]
    assert engine.engine.status().num_running == 0


def test_leaving_ends_all_answers(engine: EngineHarness) -> None:
    async def leave_early() -> None:
        asked = replace(several("left", 8, videos=[unsure_video(1)]), max_tokens=4000, ignore_eos=True)
        async with aclosing(engine.engine.generate(asked)) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    break

    engine.run(leave_early())
    assert (engine.engine.status().num_running, engine.engine.status().num_waiting) == (0, 0)
    # The workers are free: if the eight were still running, eight times 4000 tokens would come first.
    assert engine.answer(ask("then", "Hello.", [], max_tokens=2)).finished.completion_tokens <= 2


@pytest.mark.slow
def test_a_compressed_prompt_may_have_several_answers(engine: EngineHarness) -> None:
    asked = replace(several("compressed", 3, videos=[unsure_video(2)]), compression=Compression.DYCOKE)
    assert engine.run(choices(engine, asked)) == alone(engine, asked)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_killed_worker_changes_no_token(role: str) -> None:
    engine = EngineHarness(PAIR)
    try:
        for temperature in (0.0, 0.8):
            asked = several(f"{temperature}", 4, temperature, SpeculationMode.PARALLEL, [unsure_video(4)])
            expected = alone(engine, asked)
            before = engine.engine.worker_pids()[role]
            begun: set[int] = set()

            def kill_soon(event: TextDelta, begun: set[int] = begun) -> None:
                if len(begun) < 4 and len(begun | {event.choice}) == 4:  # all have begun
                    engine.kill(role)
                begun.add(event.choice)

            assert engine.run(choices(engine, asked, kill_soon), timeout_s=110) == expected
            engine.wait_until_replaced(role, before)
    finally:
        engine.close()
