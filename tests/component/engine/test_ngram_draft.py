"""Without a draft model: the same ids in every mode, and there is still speculation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.component.engine.conftest import PAIR
from tests.component.engine.harness import EngineHarness, ask, lasting, scene_video, unsure_video
from tests.component.engine.test_grammar import GRAMMARS
from vidspec_models.request import GenerationRequest, SamplingParams, SpeculationMode
from vidspec_service.engine.config import NGRAM, WorkerConfig

LAW = SamplingParams(temperature=0.8, seed=5)
SPECULATING = (SpeculationMode.SERIAL, SpeculationMode.PARALLEL, SpeculationMode.AUTO)


@pytest.fixture(scope="module")
def alone() -> Iterator[EngineHarness]:
    harness = EngineHarness(replace(PAIR, draft=WorkerConfig(model=NGRAM)))
    yield harness
    harness.close()


def requests(mode: SpeculationMode, sampling: SamplingParams) -> list[GenerationRequest]:
    video = [scene_video(3, 2)]
    asked = [
        ask("video", "Describe the video.", video, sampling=sampling),
        ask("text", "Hello, who are you?", [], sampling=sampling),
        replace(ask("schema", "Describe the video.", video, sampling=sampling), grammar=GRAMMARS["schema"]),
        lasting(ask("noise", "Describe the video.", [unsure_video(2, 2)], sampling=sampling)),
    ]
    return [replace(each, request_id=f"{mode}-{each.request_id}", speculation=mode) for each in asked]


@pytest.mark.parametrize("sampling", [SamplingParams(), LAW], ids=["greedy", "sampled"])
def test_every_mode_gives_the_same_ids_alone_and_together(alone: EngineHarness, sampling: SamplingParams) -> None:
    wanted = [alone.answer(each).ids for each in requests(SpeculationMode.OFF, sampling)]
    for mode in SPECULATING:
        assert [alone.answer(each).ids for each in requests(mode, sampling)] == wanted, mode
        together = [replace(each, request_id=f"t-{each.request_id}") for each in requests(mode, sampling)]
        assert [answer.ids for answer in alone.answers(together)] == wanted, mode


def test_what_was_said_before_is_proposed_and_comes_true(alone: EngineHarness) -> None:
    first, again = (
        alone.answer(
            ask(name, "Describe the video.", [scene_video(8)], max_tokens=80, speculation=SpeculationMode.AUTO)
        )
        for name in ("first", "again")
    )
    assert again.ids == first.ids
    stats = again.finished.speculation
    assert stats.num_accepted_tokens > 0.8 * len(again.ids)
    # Not fewer verifications: on a busy machine, more than one row may not be worth its measured cost.
    assert stats.num_accepted_tokens > first.finished.speculation.num_accepted_tokens


def test_there_is_one_worker(alone: EngineHarness) -> None:
    assert list(alone.engine.worker_pids()) == ["target"]
    assert alone.engine.info.draft_model == NGRAM
