"""Tokens are sent in batches, and none waits for long, is lost or is out of order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.cluster.engine_replica import Reply, in_batches, join_texts
from vidspec_service.engine.types import GenerationEvent, PromptReady, TextDelta, TokenDetail, TokenSource
from vidspec_service.errors import ContextLengthExceeded, GenerationFailed

PROMPT_READY = PromptReady(request_id="r", prompt_tokens=5, video_tokens=0)


def word(number: int) -> TextDelta:
    return TextDelta(text=str(number), num_tokens=1, ids=(number,))


def words(*numbers: int) -> TextDelta:
    return TextDelta(text="".join(map(str, numbers)), num_tokens=len(numbers), ids=numbers)


async def batches_of(events: AsyncGenerator[GenerationEvent, None], pause_s: float) -> list[list[Reply]]:
    async with aclosing(in_batches(events, pause_s)) as batches:
        return [batch async for batch in batches]


@given(pauses=st.lists(st.sampled_from([0.0, 0.001]), max_size=20), pause_s=st.sampled_from([0.0, 0.002]))
def test_all_events_come_in_order(pauses: list[float], pause_s: float) -> None:
    async def events() -> AsyncGenerator[GenerationEvent, None]:
        for number, seconds in enumerate(pauses):
            await asyncio.sleep(seconds)
            yield word(number)

    found = asyncio.run(batches_of(events(), pause_s))
    told = [event for batch in found for event in batch if isinstance(event, TextDelta)]
    assert join_texts(told) == ([words(*range(len(pauses)))] if pauses else [])
    assert all(len(batch) == 1 for batch in found)


def test_the_first_text_is_told_at_once_and_what_follows_soon_together() -> None:
    async def listen() -> list[list[Reply]]:
        goes_on = asyncio.Event()

        async def events() -> AsyncGenerator[GenerationEvent, None]:
            yield PROMPT_READY
            await asyncio.sleep(0.01)
            yield word(0)
            await goes_on.wait()
            for number in range(1, 6):
                yield word(number)
                await asyncio.sleep(0)

        found = []
        async with aclosing(in_batches(events(), 0.2)) as batches:
            async for batch in batches:
                found.append(batch)
                if word(0) in batch:
                    goes_on.set()  # no more events come before this one was passed on
        return found

    assert asyncio.run(listen()) == [[PROMPT_READY], [word(0)], [words(*range(1, 6))]]


def test_texts_are_joined_but_for_what_lies_between_and_what_was_held_back() -> None:
    held_back = TextDelta(text="end", num_tokens=0)
    events: list[GenerationEvent] = [word(0), word(1), PROMPT_READY, word(2), word(3), held_back]
    assert join_texts(events) == [words(0, 1), PROMPT_READY, words(2, 3), held_back]
    assert TextDelta.joined([word(0), word(1), word(2)]) == words(0, 1, 2)
    first, second = (TokenDetail(text=text, source=TokenSource.TARGET) for text in "ab")
    deltas = [replace(word(0), details=(first,)), replace(word(1), details=(second,))]
    assert TextDelta.joined(deltas).details == (first, second)


def test_the_first_words_and_the_last_wait_for_nothing() -> None:
    async def hear() -> list[list[Reply]]:
        found, is_heard = list[list[Reply]](), [asyncio.Event(), asyncio.Event()]

        async def events() -> AsyncGenerator[GenerationEvent, None]:
            yield PROMPT_READY
            await is_heard[0].wait()
            yield word(0)
            await is_heard[1].wait()
            yield word(1)

        async with asyncio.timeout(5), aclosing(in_batches(events(), 60.0)) as batches:
            async for batch in batches:
                found.append(batch)
                for event in is_heard[: len(found)]:
                    event.set()
        return found

    assert asyncio.run(hear()) == [[PROMPT_READY], [word(0)], [word(1)]]


def test_what_came_before_an_error_is_told_before_it() -> None:
    async def events() -> AsyncGenerator[GenerationEvent, None]:
        yield word(0)
        raise GenerationFailed("broken")

    found: list[list[Reply]] = []

    async def hear() -> None:
        async for batch in in_batches(events(), 0.0):
            found.append(batch)

    with pytest.raises(GenerationFailed):
        asyncio.run(hear())
    assert found == [[word(0)]]


def test_a_refusal_is_told_and_not_raised_which_to_ray_would_be_an_error_of_the_engine() -> None:
    refusal = ContextLengthExceeded("too long")

    async def events() -> AsyncGenerator[GenerationEvent, None]:
        yield PROMPT_READY
        raise refusal

    assert asyncio.run(batches_of(events(), 0.0)) in ([[PROMPT_READY], [refusal]], [[PROMPT_READY, refusal]])


def test_a_caller_that_leaves_ends_the_events() -> None:
    closed = []

    async def events() -> AsyncGenerator[GenerationEvent, None]:
        try:
            yield word(0)
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def leave() -> None:
        async with aclosing(in_batches(events(), 0.0)) as batches:
            await anext(batches)

    asyncio.run(leave())
    assert closed
