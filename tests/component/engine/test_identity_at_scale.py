"""Losslessness at scale: hundreds of prompts, dozens of clips, every mode, greedy and sampled, and transformers."""

from __future__ import annotations

import pytest

from tests.component.engine.harness import EngineHarness, ask, scene_video
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.reference.stock import StockGenerator
from vidspec_models.request import GenerationRequest, SamplingParams, SpeculationMode

pytestmark = [pytest.mark.component, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_CLIPS = 50
QUESTIONS = (
    "Describe the video.",
    "Which letters are shown, and when?",
    "How many objects are there?",
    "Tell me everything that moves and where it goes.",
)
MOST_TOKENS = 64
AT_ONCE = 8
MODES = (SpeculationMode.SERIAL, SpeculationMode.PARALLEL, SpeculationMode.AUTO)
SEED = 7_000_000  # scenes that no other test uses


def requests(mode: SpeculationMode, temperature: float) -> list[GenerationRequest]:
    return [
        ask(
            f"{mode}-{temperature}-{clip}-{number}",
            question,
            [scene_video(SEED + clip)],
            sampling=SamplingParams(temperature=temperature, seed=1000 * clip + number),
            speculation=mode,
            max_tokens=MOST_TOKENS,
        )
        for clip in range(NUM_CLIPS)
        for number, question in enumerate(QUESTIONS)
    ]


def ids(engine: EngineHarness, asked: list[GenerationRequest], at_once: int = AT_ONCE) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for start in range(0, len(asked), at_once):
        found += [answer.ids for answer in engine.answers(asked[start : start + at_once])]
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_hundred_prompts_have_one_text_in_every_mode(engine: EngineHarness, temperature: float) -> None:
    alone = ids(engine, requests(SpeculationMode.OFF, temperature))
    assert len(alone) == 200
    for mode in MODES:
        differing = [
            number
            for number, pair in enumerate(zip(ids(engine, requests(mode, temperature)), alone, strict=True))
            if pair[0] != pair[1]
        ]
        assert not differing, f"{mode}: prompts {differing}"


def test_fifty_clips_give_the_ids_of_stock_generate_alone_and_eight_at_once(engine: EngineHarness) -> None:
    stock = StockGenerator(ModelSpec(path="bundled", role="target", dtype="float32"))
    asked = requests(SpeculationMode.OFF, 0.0)[:: len(QUESTIONS)]
    expected = [stock.answer(request.turns, request.videos, MOST_TOKENS).ids for request in asked]
    assert ids(engine, asked, at_once=1) == expected
    assert ids(engine, asked) == expected
