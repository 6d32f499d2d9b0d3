"""The bundled pair judged offline on one clip, and the engine's result with the same strategy."""

from __future__ import annotations

import pytest

from vidspec_models.request import Preservation
from vidspec_service.bench.pruning.options import PruningConfig, PruningOptions, PruningTask, clip_prompts
from vidspec_service.bench.pruning.run import measure_long_clip, measure_pruning
from vidspec_service.bench.pruning.teacher_forcing import LoadedPair, laws_of, target_answer, teacher_force
from vidspec_service.engine.config import EngineConfig, WorkerConfig

PAIR = EngineConfig(
    target=WorkerConfig(model="bundled", dtype="float32"), draft=WorkerConfig(model="bundled", dtype="float32")
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_measures_everything_that_it_reports() -> None:
    options = PruningOptions(
        num_clips=2,
        strategies=(Preservation.HIPPO, Preservation.NONE, Preservation.BLIND),
        ratios=(0.9,),
        tasks=(PruningTask.CAPTION,),
        max_tokens=24,
        long_frames=12,
        use_engine=True,
    )
    report = measure_pruning(options, PAIR, lambda *_: None)
    (hippo,) = (
        row for row in report.figures["results"] if (row["strategy"], row["task"]) == ("hippo", PruningTask.CAPTION)
    )
    assert hippo["video_tokens"] == 52
    assert hippo["tokens_per_s_from"] == "engine"
    assert hippo["tokens_per_s"] > 0
    assert report.figures["long_clip"]["video_tokens"] == 12 * 64 + 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hippos_choice_is_timed_though_other_strategies_are_compared() -> None:
    options = PruningOptions(strategies=(Preservation.NONE,), ratios=(0.9,), long_frames=8)
    clip = measure_long_clip(LoadedPair(PAIR), options)
    choice_s = clip["selection_s"]["hippo"]
    assert clip["scoring_over_prefill"] == (clip["relevance_s"] + choice_s) / clip["target_prefill_s"]
    assert choice_s > 0


@pytest.mark.slow
def test_a_target_that_is_its_own_draft_agrees_with_itself() -> None:
    """The harness is right if identical models agree at every token, but not when the draft sees no video."""
    models = LoadedPair(PAIR)
    models.draft = models.target
    configs = [PruningConfig(Preservation.NONE, 0.0), PruningConfig(Preservation.BLIND, 1.0)]
    clip_prompt = next(iter(clip_prompts(1, (PruningTask.CAPTION,))))
    answer = target_answer(models, clip_prompt, laws_of(configs), 40)
    full_prompt, blind = teacher_force(models, clip_prompt, answer, configs, seed=0)
    assert all(full_prompt.matches)
    assert not all(blind.matches)
