"""A target whose layers are split over two devices, in the real engine: the ids are the same as unsplit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.component.engine.family_world import video
from tests.component.engine.harness import EngineHarness, ask
from tests.unit.models.families.test_exactness import SIZES
from tests.unit.models.families.tiny_checkpoints import save
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.reference.stock import StockGenerator
from vidspec_models.request import Compression, GenerationRequest, SpeculationMode
from vidspec_service.engine.config import DyCoke, EngineConfig, WorkerConfig

pytestmark = pytest.mark.slow  # loads two workers and stock transformers

FAMILY = "qwen3_vl"  # adds features after layers on both devices
CHUNK, ANSWER, TRIES = 128, 24, 20
SEEDS = (0, 1, 3, 4)


@dataclass(frozen=True)
class World:
    """The engine, and stock transformers on the unsplit checkpoint."""

    engine: EngineHarness
    stock: StockGenerator

    def wanted(self, asked: GenerationRequest) -> tuple[int, ...]:
        return self.stock.answer(asked.turns, asked.videos, ANSWER).ids


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp(FAMILY)
    save(FAMILY, folder / "target")
    save(FAMILY, folder / "draft", noise=0.02)
    target, draft = (
        WorkerConfig(model=str(folder / role), dtype="float32", device=device)
        for role, device in (("target", "cpu,cpu"), ("draft", "cpu"))
    )
    stock = StockGenerator(ModelSpec(path=target.model, role="target", device="cpu", dtype="float32"))
    # Too small for four growing requests: the youngest is paused, resumes, and its answer so far is prefilled again.
    engine = EngineHarness(
        EngineConfig(target=target, draft=draft, prefill_chunk=CHUNK, kv_cache_tokens=1280, dycoke=DyCoke(layer=1))
    )
    yield World(engine, stock)
    engine.close()


def request(mode: SpeculationMode, seed: int) -> GenerationRequest:
    clip = video(seed, 3 + seed % 3, SIZES[seed % 2])
    return ask(f"{mode}-{seed}", f"question {seed}", [clip], max_tokens=ANSWER, speculation=mode)


def longer(asked: GenerationRequest) -> GenerationRequest:
    """The request with a prompt so long that its answer needs another cache block."""
    (message,) = asked.turns
    return replace(asked, turns=(replace(message, parts=(*message.parts, "?" * 60)),))


@pytest.mark.parametrize("mode", [SpeculationMode.OFF, SpeculationMode.PARALLEL])
def test_ids_are_those_of_generate_alone_together_and_after_a_pause(world: World, mode: SpeculationMode) -> None:
    requests = [longer(request(mode, seed)) for seed in SEEDS]
    wanted = [world.wanted(each) for each in requests]
    assert [answer.ids for answer in world.engine.answers(requests)] == wanted
    for attempt in range(TRIES):  # until the draft is in time, which it may not be on a busy machine
        alone = world.engine.answer(replace(requests[1], request_id=f"alone-{mode}-{attempt}"))
        assert alone.ids == wanted[1]
        if mode is SpeculationMode.OFF or alone.finished.speculation.num_draft_tokens > 0:
            return
    pytest.fail("the draft never proposed anything")


def test_both_places_are_named(world: World) -> None:
    info = world.engine.engine.info
    assert info.devices == {"target": "cpu,cpu float32", "draft": "cpu float32"}


def test_a_follow_up_begins_with_the_rows_that_are_there(world: World) -> None:
    known = replace(video(5, 5, SIZES[1]), key="known")
    first, again = (
        replace(request(SpeculationMode.PARALLEL, 5), request_id=name, videos=(known,)) for name in ("first", "again")
    )
    ids = [world.engine.answer(asked) for asked in (first, again)]
    assert ids[0].finished.cached_tokens == 0
    assert ids[1].finished.cached_tokens >= CHUNK
    assert ids[0].ids == ids[1].ids == world.wanted(first)


def test_dycoke_hides_the_same_rows_in_every_mode(world: World) -> None:
    compressed = [
        replace(request(mode, 3), request_id=f"dycoke-{mode}", compression=Compression.DYCOKE)
        for mode in (SpeculationMode.OFF, SpeculationMode.PARALLEL)
    ]
    off, parallel = (world.engine.answer(asked) for asked in compressed)
    assert off.ids == parallel.ids
