"""However many engines work on an answer in turn, the caller gets the answer of a single engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.fakes import FINISHED
from tests.unit.engine.frontend.test_output_processor import TOKENIZER
from vidspec_models.request import GenerationRequest, Turn
from vidspec_service.cluster import failover
from vidspec_service.cluster.failover import MAX_LOST, Ask, EngineLost, generate_with_failover
from vidspec_service.engine.frontend.merge_streams import merge_streams
from vidspec_service.engine.frontend.output_processor import OutputProcessor
from vidspec_service.engine.frontend.request_table import CLEARED_AFTER
from vidspec_service.engine.ipc.messages import Ended, Tokens
from vidspec_service.engine.types import Finished, FinishReason, GenerationEvent, PromptReady, TextDelta
from vidspec_service.errors import EngineDead, GenerationFailed
from vidspec_service.telemetry import EngineMetrics


@dataclass
class Engines:
    """Engines that commit `text` in random pieces; the n-th engine is lost after `lives[n]` events."""

    text: str
    lives: list[int]
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    is_planned: bool = True
    names: list[str] = field(default_factory=list)

    async def ask(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        assert request.request_id not in self.names
        self.names.append(request.request_id)
        life = self.lives.pop(0) if self.lives else None
        events = self._events(request)
        for number, event in enumerate(events):
            if life is not None and number == life % len(events):
                raise EngineLost(is_planned=self.is_planned)
            await asyncio.sleep(0)
            yield event

    def _events(self, request: GenerationRequest) -> list[GenerationEvent]:
        output = OutputProcessor(TOKENIZER, request, EngineMetrics(CollectorRegistry()))
        ids = TOKENIZER.encode(self.text).ids[len(request.committed) :]
        told = output.process([PromptReady(request_id=request.request_id, prompt_tokens=5, video_tokens=0)])
        while ids and not any(isinstance(event, Finished) for event in told):
            size = self.rng.randint(1, 4)
            told += output.process([Tokens(request_id=request.request_id, ids=tuple(ids[:size]))])
            ids = ids[size:]
        if not any(isinstance(event, Finished) for event in told):
            ended = Ended(request_id=request.request_id, finish_reason=FinishReason.LENGTH)
            told += output.process([ended])
        return told


def request(stop: tuple[str, ...] = (), n: int = 1) -> GenerationRequest:
    return GenerationRequest(request_id="r", turns=(Turn(role="user", parts=("Say it.",)),), stop=stop, n=n)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


async def told_by(asked: GenerationRequest, ask: Ask, choice: int = 0) -> list[GenerationEvent]:
    async with aclosing(generate_with_failover(asked, ask, choice)) as events:
        return [event async for event in events]


def text_of(events: Sequence[GenerationEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def ids_of(events: list[GenerationEvent]) -> list[int]:
    return [token for event in events if isinstance(event, TextDelta) for token in event.ids]


@given(
    text=st.text(alphabet="abé🎬.", min_size=1, max_size=40),
    stop=st.lists(st.text(alphabet="abé.", min_size=1, max_size=4), max_size=2),
    lives=st.lists(st.integers(0, 15), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_an_answer_is_the_same_by_any_number_of_engines(
    text: str, stop: list[str], lives: list[int], seed: int
) -> None:
    asked = request(tuple(stop))
    alone = run(told_by(asked, Engines(text, []).ask))
    engines = Engines(text, list(lives), random.Random(seed))
    events = run(told_by(asked, engines.ask))
    assert text_of(events) == text_of(alone)
    assert ids_of(events) == ids_of(alone)
    assert isinstance(events[0], PromptReady)
    assert sum(isinstance(event, PromptReady | Finished) for event in events) == 2
    last, wanted = events[-1], alone[-1]
    assert isinstance(last, Finished)
    assert isinstance(wanted, Finished)
    assert (last.finish_reason, last.completion_tokens) == (wanted.finish_reason, wanted.completion_tokens)


def test_words_that_were_held_back_to_the_end_are_said_once() -> None:
    engines = Engines("xab", [-1, -1])  # lost after the last text, before the end
    assert text_of(run(told_by(request(stop=("abc",)), engines.ask))) == "xab"
    assert len(engines.names) == 3


def test_an_answer_without_a_word_has_its_last_engines_times() -> None:
    told = run(told_by(request(), Engines("", [1]).ask))  # lost before the end
    assert isinstance(told[-1].prefill_s, float)


def test_a_stream_that_stops_without_an_end_goes_on_elsewhere() -> None:
    engines = Engines("abc", [])
    calls = 0

    async def ask(asked: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        nonlocal calls
        calls += 1
        async for event in engines.ask(asked):
            if calls == 1 and isinstance(event, Finished):
                return
            yield event

    assert text_of(run(told_by(request(), ask))) == "abc"
    assert calls == 2


def test_streams_that_stop_without_an_end_again_and_again_are_not_followed_for_ever() -> None:
    names: list[str] = []

    async def ask(asked: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        names.append(asked.request_id)
        assert len(names) <= MAX_LOST
        yield PromptReady(request_id=asked.request_id, prompt_tokens=5, video_tokens=0)

    with pytest.raises(GenerationFailed, match="2 engines ended"):
        run(told_by(request(), ask))
    assert names[0] == request().request_id, "logs of both sides name it"


def test_what_an_answer_tells_of_its_beginning_is_the_first_engines_whoever_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, engines = [0.0], [(30.0, 60.0), (1.0, 2.0), (3.0, 4.0)]
    monkeypatch.setattr(failover, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def ask(asked: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        queue_s, prepare_s = engines.pop(0)
        for event in (
            PromptReady(request_id="r", prompt_tokens=5, video_tokens=0, queue_s=queue_s, prepare_s=prepare_s),
            TextDelta(text="a", num_tokens=1, ids=(7,)),
            replace(FINISHED, completion_tokens=1, queue_s=queue_s, prefill_s=prepare_s),
        ):
            if engines and isinstance(event, Finished):
                raise EngineLost(is_planned=True)
            yield event
            now[0] += 1.0

    told = run(told_by(request(), ask))[-1]
    assert (told.completion_tokens, told.queue_s, told.prefill_s) == (3, 30.0, 61.0)


@pytest.mark.parametrize("first", [3, 2 * CLEARED_AFTER])
def test_a_request_that_ends_engines_at_one_place_is_refused_after_the_second(first: int) -> None:
    engines = Engines("a" * 400, [first] + [2] * 50, is_planned=False)
    with pytest.raises(GenerationFailed, match="2 engines ended"):
        run(told_by(request(), engines.ask))
    assert len(engines.names) == MAX_LOST


def test_engines_that_are_ended_on_purpose_are_nobodys_fault() -> None:
    engines = Engines("a" * 50, [2] * 20)
    assert text_of(run(told_by(request(), engines.ask))) == "a" * 50
    assert len(engines.names) > 10


def test_a_request_that_got_past_the_place_is_beyond_suspicion() -> None:
    each = CLEARED_AFTER + 5  # events, of at least one token each
    engines = Engines("a" * 1000, [each] * 3, is_planned=False)
    assert text_of(run(told_by(request(), engines.ask))) == "a" * 1000
    assert len(engines.names) == 4


def test_an_error_of_the_request_itself_is_not_tried_elsewhere() -> None:
    async def ask(_: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        raise EngineDead("no more")
        yield

    with pytest.raises(EngineDead):
        run(told_by(request(), ask))


def test_several_answers_are_merged_and_told_apart() -> None:
    async def both() -> list[GenerationEvent]:
        asked = request(n=2)
        said = [Engines(text, [2]) for text in ("abc", "xyz")]
        events = merge_streams(
            [generate_with_failover(asked.choice(index), said[index].ask, index) for index in range(2)]
        )
        return [event async for event in events]

    events = run(both())
    for index, text in enumerate(("abc", "xyz")):
        mine = [event for event in events if isinstance(event, TextDelta | Finished) and event.choice == index]
        assert text_of(mine) == text
        last = mine[-1]
        assert isinstance(last, Finished)
        assert last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("leaves", [lambda: None, lambda: GenerationFailed("broken")])
def test_when_one_answer_fails_or_the_caller_leaves_all_are_closed(leaves: Callable[[], Exception | None]) -> None:
    error, closed = leaves(), []

    async def source(name: str) -> AsyncGenerator[GenerationEvent, None]:
        try:
            yield TextDelta(text=name, num_tokens=1)
            if name == "a" and error is not None:
                raise error
            await asyncio.Event().wait()
        finally:
            closed.append(name)

    async def listen() -> None:
        async with aclosing(merge_streams([source("a"), source("b")])) as events:
            num_told = 0
            async for _ in events:
                num_told += 1
                if num_told == 2 and error is None:
                    return

    if error is None:
        run(listen())
    else:
        with pytest.raises(GenerationFailed, match="broken"):
            run(listen())
    assert sorted(closed) == ["a", "b"]
