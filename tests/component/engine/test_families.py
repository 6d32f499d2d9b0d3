"""Every family through the real engine: two workers on tiny checkpoints, each mode gives stock transformers' ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.component.engine.harness import EngineHarness, ask
from tests.unit.models.families.test_exactness import SIZES, clip
from tests.unit.models.families.tiny_checkpoints import FAMILIES, save
from vidspec_models.spec import ModelSpec
from vidspec_models.stock import StockGenerator
from vidspec_service.engine.conversion import model_inputs
from vidspec_service.engine.types import EngineConfig, GenerationRequest, SpeculationMode, VideoInput, WorkerConfig

MODES = (SpeculationMode.OFF, SpeculationMode.SERIAL, SpeculationMode.PARALLEL)
ANSWER = 24


def video(seed: int) -> VideoInput:
    source = clip(seed, 3 + seed % 3, SIZES[seed % 2])
    return VideoInput(
        frames=source.frames,
        timestamps_s=tuple(index / source.source_fps for index in source.source_indices),
        source_indices=source.source_indices,
        source_fps=source.source_fps,
        source_num_frames=source.source_num_frames,
        duration_s=source.duration_s,
    )


def request(mode: SpeculationMode, seed: int) -> GenerationRequest:
    return ask(f"{mode}-{seed}", f"question {seed}", [video(seed)], max_tokens=ANSWER, speculation=mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_mode_gives_the_ids_of_generate(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "target")
    save(name, tmp_path / "draft", noise=0.02)
    target, draft = (
        WorkerConfig(model=str(tmp_path / role), dtype="float32", device="cpu") for role in ("target", "draft")
    )
    stock = StockGenerator(ModelSpec(path=target.model, role="target", device="cpu", dtype="float32"))
    requests = [request(SpeculationMode.OFF, seed) for seed in range(8)]
    wanted = [stock.ids(*model_inputs(each.messages, each.videos), ANSWER) for each in requests]
    harness = EngineHarness(EngineConfig(target=target, draft=draft))
    try:
        for mode in MODES:
            together = harness.answers([request(mode, seed) for seed in range(8)])
            assert [answer.ids for answer in together] == wanted
            assert harness.answer(request(mode, 1)).ids == wanted[1]
            accepted = sum(answer.finished.speculation.num_accepted_tokens for answer in together)
            assert mode is not SpeculationMode.SERIAL or accepted > 0
    finally:
        harness.close()
