"""Every family through the real engine: two workers on tiny checkpoints, each mode gives stock transformers' ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.component.engine.family_world import LIMITS, LONG, FamilyWorld, TracedHarness, conversations, request
from tests.unit.models.families.tiny_checkpoints import FAMILIES
from vidspec_models.request import GenerationRequest, SpeculationMode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OFF, SERIAL, PARALLEL = SpeculationMode.OFF, SpeculationMode.SERIAL, SpeculationMode.PARALLEL
MODES = (OFF, SERIAL, PARALLEL, SpeculationMode.AUTO)
ALL = range(len(conversations()))
EDGE = 512  # a multiple of every block in which a cache grows
_BELOW, _LONG = 40, 120  # tokens: all prefills end before an answer outgrows its block, and that before any answer ends
_TRIES = 20
_WORDS = 151_000


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyWorld:
    return FamilyWorld.make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def wanted(world: FamilyWorld) -> list[tuple[int, ...]]:
    """The answers of `generate` to the eight conversations; a shorter answer is the start of a longer one."""
    return [world.wanted(request(OFF, index)).ids for index in ALL]


@pytest.fixture(scope="module")
def engine(world: FamilyWorld) -> Iterator[TracedHarness]:
    with world.engine() as harness:
        yield harness


@pytest.mark.parametrize("mode", MODES)
def test_one_request_at_a_time_gives_the_ids_of_generate(
    engine: TracedHarness, wanted: list[tuple[int, ...]], mode: SpeculationMode
) -> None:
    assert [engine.answer(request(mode, index)).ids for index in ALL] == wanted


@pytest.mark.parametrize("mode", [SERIAL, PARALLEL])
def test_a_draft_that_sees_a_part_of_the_video_and_is_often_wrong_changes_nothing(
    engine: TracedHarness, wanted: list[tuple[int, ...]], mode: SpeculationMode
) -> None:
    """Repeats until the draft was fast enough: some tokens accepted, some rolled back, cells left out of its view."""
    accepted = rejected = pruned = 0
    for _ in range(_TRIES):
        for index in (LONG, 1, 5, 6):
            answer = engine.answer(request(mode, index))
            assert answer.ids == wanted[index]
            stats = answer.finished.speculation
            accepted += stats.num_accepted_tokens
            rejected += stats.num_draft_tokens - stats.num_accepted_tokens
            pruned += 0 < stats.draft_video_tokens < answer.started.video_tokens
        if accepted and rejected and pruned:
            return
    pytest.fail(f"accepted {accepted}, rejected {rejected}, answers with a pruned draft {pruned}")


@pytest.mark.parametrize("mode", MODES)
def test_eight_at_once_with_joins_and_leaves_give_the_ids_of_generate(
    engine: TracedHarness, wanted: list[tuple[int, ...]], mode: SpeculationMode
) -> None:
    requests = [request(mode, index, "among others", limit) for index, limit in zip(ALL, LIMITS, strict=True)]
    expected = [ids[:limit] for ids, limit in zip(wanted, LIMITS, strict=True)]
    for together in (engine.answers, engine.joined):
        assert [answer.ids for answer in together(requests)] == expected


def test_requests_of_all_modes_do_not_disturb_each_other(engine: TracedHarness, wanted: list[tuple[int, ...]]) -> None:
    requests = [request(MODES[index % len(MODES)], index, "mixed") for index in ALL]
    assert [answer.ids for answer in engine.answers(requests)] == wanted


def test_requests_that_were_paused_give_the_ids_of_generate(world: FamilyWorld) -> None:
    """The answers outgrow the cache, which has room for all of them only at first: the youngest request is paused.

    Repeats until that was so: on a busy machine one may have ended before the last has begun.
    """
    chosen = (1, 2, 5, 6)
    lengths = [world.wanted(request(OFF, index, max_tokens=1)).prompt_tokens for index in chosen]
    prompts = [(index, "?" * (EDGE - _BELOW - length)) for index, length in zip(chosen, lengths, strict=True)]
    room = len(chosen) * EDGE

    def asked(mode: SpeculationMode) -> list[GenerationRequest]:
        answers = [request(mode, index, max_tokens=_LONG, longer=filler) for index, filler in prompts]
        return [replace(each, min_tokens=_LONG) for each in answers]

    expected = [world.wanted(each).ids for each in asked(OFF)]
    once = sum(EDGE - _BELOW + len(ids) - 1 for ids in expected)
    for _ in range(_TRIES):
        with world.engine(kv_cache_tokens=room) as harness:
            assert [answer.ids for answer in harness.answers(asked(OFF))] == expected
            if harness.target_rows() >= once + EDGE - _BELOW:
                assert [answer.ids for answer in harness.answers(asked(PARALLEL))] == expected
                return
    pytest.fail("nobody was paused: every row was made once")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_that_is_right_is_believed_at_a_released_models_vocabulary(name: str, tmp_path: Path) -> None:
    """Repeats until the draft proposed something: beside other work it may come too late for every answer."""
    world = FamilyWorld.oracle(name, tmp_path, num_words=_WORDS)
    with world.engine(prune_ratio=0.0) as engine:
        for mode in (SERIAL, PARALLEL):
            proposed = accepted = 0
            for _ in range(_TRIES):
                for index in ALL:
                    answer = engine.answer(request(mode, index))
                    assert answer.ids == world.wanted(request(mode, index)).ids, (mode, index)
                    proposed += answer.finished.speculation.num_draft_tokens
                    accepted += answer.finished.speculation.num_accepted_tokens
                if proposed:
                    break
            assert accepted == proposed > 0
