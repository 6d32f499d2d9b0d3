"""A second question about a video: less to compute, the same text, and never another video's cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.component.engine.harness import EngineHarness, ask, scene_video, unsure_video
from vidspec_models.request import Compression, SpeculationMode, Turn

pytestmark = pytest.mark.component

QUESTIONS = ("Describe the video.", "How many objects are there?", "What colour is the background?")


@pytest.mark.parametrize("mode", [SpeculationMode.OFF, SpeculationMode.PARALLEL])
def test_follow_ups_reuse_the_prompt_and_say_what_a_first_question_would(
    engine: EngineHarness, mode: SpeculationMode
) -> None:
    video = scene_video(31)
    known = replace(video, key=f"follow-up-{mode}")
    for number, question in enumerate(QUESTIONS):
        fresh = engine.answer(ask(f"fresh-{mode}-{number}", question, [video], speculation=mode))
        again = engine.answer(ask(f"again-{mode}-{number}", question, [known], speculation=mode))
        assert again.ids == fresh.ids
        assert fresh.finished.cached_tokens == 0
        assert again.finished.cached_tokens == (512 if number else 0)


@pytest.mark.parametrize("mode", [SpeculationMode.OFF, SpeculationMode.PARALLEL])
def test_questions_that_come_together_prefill_their_video_once_and_answer_as_if_alone(
    engine: EngineHarness, mode: SpeculationMode
) -> None:
    video = scene_video(34)
    known = replace(video, key=f"together-{mode}")
    alone = [
        engine.answer(ask(f"alone-{mode}-{number}", question, [video], speculation=mode))
        for number, question in enumerate(QUESTIONS)
    ]
    together = engine.answers(
        [
            ask(f"together-{mode}-{number}", question, [known], speculation=mode)
            for number, question in enumerate(QUESTIONS)
        ]
    )
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert sorted(answer.finished.cached_tokens for answer in together) == [0, 512, 512]


@pytest.mark.parametrize("compression", [Compression.V_CAST, Compression.VIDCOM2, Compression.EARLYTOM])
def test_follow_ups_about_a_compressed_video_reuse_what_was_kept_of_it(
    engine: EngineHarness, compression: Compression
) -> None:
    video = scene_video(35)
    known = replace(video, key=f"compressed-{compression}")
    for number, question in enumerate(QUESTIONS[:2]):
        fresh, again = (
            engine.answer(replace(ask(f"{name}-{compression}-{number}", question, [shown]), compression=compression))
            for name, shown in (("fresh", video), ("again", known))
        )
        assert again.ids == fresh.ids
        assert again.finished.cached_tokens == (128 if number else 0)


def test_instructions_are_computed_once_for_a_caller_whatever_is_shown_after_them(engine: EngineHarness) -> None:
    instructions = Turn(role="system", parts=("Answer in a few words. " * 40,))
    clip = scene_video(36)
    asked = [ask("words", "Who are you?", [])] + [
        ask(f"clip-{key}", QUESTIONS[0], [replace(clip, key=f"instructed-{key}")]) for key in "ab"
    ]
    found = [engine.answer(replace(each, turns=(instructions, *each.turns), caller="one")) for each in asked]
    cached = [answer.finished.cached_tokens for answer in found]
    assert cached[0] == 0
    assert cached[1] == cached[2] >= 128
    for number, caller in ((1, "two"), (2, "three")):
        request = replace(asked[number], request_id=caller, caller=caller, turns=(instructions, *asked[number].turns))
        fresh = engine.answer(request)
        assert (fresh.finished.cached_tokens, fresh.ids) == (0, found[number].ids)


def test_a_video_with_the_same_tokens_gets_nothing_of_another(engine: EngineHarness) -> None:
    mine, yours = scene_video(32), unsure_video(33)
    engine.answer(ask("mine", QUESTIONS[0], [replace(mine, key="mine")]))
    fresh = engine.answer(ask("fresh", QUESTIONS[0], [yours]))
    found = engine.answer(ask("yours", QUESTIONS[0], [replace(yours, key="yours")]))
    assert found.finished.cached_tokens == 0
    assert found.started.prompt_tokens == fresh.started.prompt_tokens
    assert found.ids == fresh.ids
