"""The bundled pair judged offline on one clip, and the engine's result with the same strategy."""

from __future__ import annotations

import pytest

from vidspec_models.request import Preservation
from vidspec_service.bench.pruning.judging import LoadedPair, answered, judged, laws_of
from vidspec_service.bench.pruning.options import PruningOptions, Setting, Task, asked_about
from vidspec_service.bench.pruning.run import measure_long_clip, measure_pruning
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
        tasks=(Task.CAPTION,),
        max_tokens=24,
        long_frames=12,
        use_engine=True,
    )
    report = measure_pruning(options, PAIR, lambda *_: None)
    (hippo,) = (row for row in report.figures["results"] if (row["strategy"], row["task"]) == ("hippo", Task.CAPTION))
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
    settings = [Setting(Preservation.NONE, 0.0), Setting(Preservation.BLIND, 1.0)]
    asked = next(iter(asked_about(1, (Task.CAPTION,))))
    answer = answered(models, asked, laws_of(settings), 40)
    whole, blind = judged(models, asked, answer, settings, seed=0)
    assert all(whole.hits)
    assert not all(blind.hits)
