"""Requests with any combination of fields, several at once: each gets in every mode what it gets alone without a draft.

The fields are drawn at random from a seed, since a pair of fields that nobody thought of is where modes may differ.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import EngineHarness, scene_video, unsure_video
from tests.component.engine.test_grammar import JSON, REGEX
from vidspec_models.request import (
    VIDEO,
    Compression,
    GenerationRequest,
    Include,
    Preservation,
    SamplingParams,
    SpeculationMode,
    Turn,
    Video,
)
from vidspec_service.engine.types import Finished, TextDelta

MODES = (SpeculationMode.SERIAL, SpeculationMode.PARALLEL, SpeculationMode.AUTO)
GRAMMARS = (
    JSON,
    REGEX,
    LLMatcher.grammar_from_lark('start: a " and " a\na[max_tokens=8]: /[a-z ]*/'),
    LLMatcher.grammar_from_lark('start: "The video shows " rest\nrest[stop="."]: /[^.]*/'),
)
QUESTIONS = (
    "Describe the video.",
    "How many objects are there?",
    "Which colors?",
    "Describe the video as JSON.",
    "🙂 é?",
)
STOPS = (" the", ".", "circle", "o", "and th")
NUM_TOKENS = 700  # of the vocabulary, of which all of these may be named
Told = dict[int, tuple[Any, ...]]  # by choice: ids, text, log probabilities, the end


class Dice(random.Random):
    """Draws requests."""

    def videos(self, count: int) -> list[Video]:
        kinds = [self.choice((scene_video, unsure_video)) for _ in range(count)]
        videos = [kind(self.randrange(50), self.choice((2, 2, 4, 8))) for kind in kinds]
        return [replace(video, key=self.choice((None, f"video {self.getrandbits(64)}"))) for video in videos]

    def turns(self, videos: list[Video]) -> tuple[tuple[Turn, ...], tuple[Video, ...]]:
        """One to three questions, most of them with one video and some with two."""
        turns, shown = list[Turn](), list[Video]()
        for number in range(self.choice((1, 1, 1, 2, 3))):
            if number:
                turns.append(Turn(role="assistant", parts=(self.choice(("A red circle moves.", "Two.")),)))
            parts: list[str | None] = [self.choice(QUESTIONS)]
            if self.random() < (0.15 if number else 0.9):
                parts, shown = [VIDEO, *parts], [*shown, self.choice(videos)]
            turns.append(Turn(role="user", parts=tuple(parts)))
        return tuple(turns), tuple(shown)

    def sampling(self) -> SamplingParams:
        named = self.sample(range(5, NUM_TOKENS), self.choice((0, 0, 0, 3)))
        return SamplingParams(
            temperature=self.choice((0.0, 0.0, 0.2, 0.7, 1.5)),
            top_p=self.choice((1.0, 1.0, 0.9, 0.5)),
            top_k=self.choice((0, 0, 1, 5, 40)),
            min_p=self.choice((0.0, 0.0, 0.05, 0.3)),
            seed=self.randrange(2**64),
            presence_penalty=self.choice((0.0, 0.0, 1.5, -1.0)),
            frequency_penalty=self.choice((0.0, 0.0, 0.7, -0.5)),
            repetition_penalty=self.choice((1.0, 1.0, 1.2, 0.8)),
            logit_bias=tuple((token, self.choice((-100.0, -3.0, 2.0, 100.0))) for token in named),
            bad_words=tuple(self.sample(("red", " moves", "The video", "a"), self.choice((0, 0, 0, 2)))),
        )

    def request(self, name: str, videos: list[Video]) -> GenerationRequest:
        turns, shown = self.turns(videos)
        compression = self.choice((*[Compression.NONE] * 5, *Compression)) if shown else Compression.NONE
        is_kept = compression is Compression.NONE
        grammar = self.choice((*[None] * 8, *GRAMMARS))
        return GenerationRequest(
            request_id=name,
            caller=self.choice("ab"),
            turns=turns,
            videos=shown,
            max_tokens=self.choice((1, 2, 8, 17, 33, 34, 64, 110)),
            sampling=self.sampling(),
            min_tokens=0 if grammar else self.choice((0, 0, 5, 40)),
            stop=tuple(self.sample(STOPS, self.choice((0, 0, 0, 2)))),
            stop_token_ids=tuple(self.sample(range(5, NUM_TOKENS), self.choice((0, 0, 0, 3)))),
            ignore_eos=grammar is None and self.random() < 0.15,
            logprobs=self.choice((None, None, 0, 3)),
            compression=compression,
            compression_ratio=None if is_kept else self.choice((None, 0.1, 0.5)),
            preservation=self.choice((None, *Preservation)),
            prune_ratio=self.choice((None, 0.0, 0.5, 0.99)),
            cache_salt=self.choice((None, "salt")),
            include=frozenset(self.sample(list(Include), self.choice((0, 0, 1, 3)))),
            grammar=grammar,
            n=self.choice((1, 1, 1, 2)),
        )


async def told(engine: EngineHarness, request: GenerationRequest, late_s: float = 0.0) -> Told:
    await asyncio.sleep(late_s)
    found: Told = dict.fromkeys(range(request.n), ((), "", (), None))
    async with aclosing(engine.engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                ids, text, logprobs, end = found[event.choice]
                found[event.choice] = (ids + event.ids, text + event.text, logprobs + event.logprobs, end)
            elif isinstance(event, Finished):
                end = (event.finish_reason, event.completion_tokens)
                found[event.choice] = (*found[event.choice][:3], end)
    return found


async def together(engine: EngineHarness, requests: list[GenerationRequest], dice: Dice) -> list[Told]:
    """All at once, and for a moment others, whose clients leave."""
    leaving = [
        asyncio.ensure_future(told(engine, replace(each, request_id=f"-{each.request_id}"))) for each in requests
    ]
    answers = asyncio.gather(*(told(engine, each, dice.uniform(0.0, 0.05)) for each in requests))
    for client in leaving:
        await asyncio.sleep(dice.uniform(0.0, 0.05))
        client.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    return await answers


@pytest.fixture(scope="module")
def full() -> Iterator[EngineHarness]:
    """An engine without room for all of them at once."""
    harness = EngineHarness(replace(PAIR, kv_cache_tokens=3000, max_running_requests=5))
    yield harness
    harness.close()


def check(engine: EngineHarness, seed: int) -> None:
    dice = Dice(seed)
    videos = dice.videos(6)
    requests = [dice.request(f"{seed} {number}", videos) for number in range(6)]
    alone = [
        engine.run(told(engine, replace(each, request_id=f"{each.request_id} alone", speculation=SpeculationMode.OFF)))
        for each in requests
    ]
    for shift in range(len(MODES)):  # each request in each mode
        asked = [
            replace(each, request_id=f"{each.request_id} {shift}", speculation=MODES[(number + shift) % len(MODES)])
            for number, each in enumerate(requests)
        ]
        for request, mine, expected in zip(asked, engine.run(together(engine, asked, dice)), alone, strict=True):
            assert mine == expected, replace(request, videos=())


@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_request_asks_for_its_answer_is_the_one_without_a_draft(engine: EngineHarness, seed: int) -> None:
    check(engine, seed)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2, 16))
def test_nor_does_it_depend_on_room_for_all_of_them(full: EngineHarness, seed: int) -> None:
    check(full, seed)
