"""`bench pruning` without models: from counts to rates, results, tables, plots and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.fakes import FINISHED, PROMPT_READY, FakeEngine
from tests.unit.bench.reports import draws, text_of
from vidspec_models.bundled.questions import QUESTION_TYPES
from vidspec_models.request import Preservation
from vidspec_service.bench.common.bootstrap import difference, paired
from vidspec_service.bench.common.report import Report, Row
from vidspec_service.bench.pruning import run
from vidspec_service.bench.pruning.options import (
    QUESTION_TASKS,
    PruningConfig,
    PruningOptions,
    PruningTask,
    clip_prompts,
)
from vidspec_service.bench.pruning.report import Speed, pruning_report, results
from vidspec_service.bench.pruning.run import time_line
from vidspec_service.bench.pruning.teacher_forcing import (
    ForcedAnswer,
    LoadedPair,
    count_accepted,
    laws_of,
    pruning_configs,
)
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.types import TextDelta
from vidspec_service.errors import ConfigError

OPTIONS = PruningOptions(
    strategies=(Preservation.HIPPO, Preservation.RANDOM, Preservation.NONE, Preservation.BLIND),
    ratios=(0.9, 0.0),
    tasks=(PruningTask.CAPTION, PruningTask.COUNT),
)
ISSUE_KEYS = (
    "strategy", "ratio", "task", "acceptance_rate", "ci_low", "ci_high", "mean_accepted_tokens", "draft_prefill_s",
    "tokens_per_s",
)  # fmt: skip


def answers(
    config: PruningConfig, clip: int, matches: Sequence[int], task: PruningTask = PruningTask.CAPTION
) -> ForcedAnswer:
    return ForcedAnswer(
        config=config,
        clip=clip,
        task=task,
        matches=tuple(bool(hit) for hit in matches),
        video_tokens=52,
        prefill_s=0.5,
        selection_s=0.25,
    )


def all_answers() -> list[ForcedAnswer]:
    """Four clips, with 9 of 10 tokens accepted unpruned, 8 with hippo, 6 with random, none with blind."""
    found = []
    for config in pruning_configs(OPTIONS):
        num_right = {"none": 9, "hippo": 8, "random": 6, "blind": 0}[config.strategy]
        for clip in range(4):
            found.append(answers(config, clip, [1] * num_right + [0] * (10 - num_right)))
            found.append(answers(config, clip, [1, 0], PruningTask.COUNT))
    return found


def predicted(*_: object) -> tuple[float, str]:
    return 100.0, "speed model"


def rows_of(found: Sequence[ForcedAnswer], speed: Speed = predicted) -> list[Row]:
    return results(OPTIONS, found, speed)


def report_of(found: Sequence[ForcedAnswer], speed: Speed = predicted) -> Report:
    line = time_line(first_token_s=1.0, relevance_s=0.1, draft_prepare_s=0.5, choice_s=0.01, draft_prefill_s=0.02)
    clip = {
        "frames": 64,
        "video_tokens": 4097,
        "target_prepare_s": 0.5,
        "target_prefill_s": 0.5,
        "draft_prepare_s": 0.5,
        "relevance_s": 0.1,
        "scoring_over_prefill": 0.22,
        "draft_prefill_s": {"0": 0.2, "0.9": 0.02},
        "draft_prefill_ratio": 0.1,
        "time_line": line,
    }
    facts = {"model": "bundled", "device": "cpu", "dtype": "float32", "threads": 1}
    rows, models = rows_of(found, speed), {"target": facts, "draft": facts}
    return pruning_report(OPTIONS, rows, clip, models, [])


def test_results_have_the_keys_and_rows_that_were_promised() -> None:
    content = json.loads(report_of(all_answers()).to_json())
    assert set(ISSUE_KEYS) <= set(content["results"][0])
    assert {"hardware", "versions", "command", "baseline", "models"} <= set(content)
    rows = {(row["strategy"], row["ratio"], row["task"]) for row in content["results"]}
    tasks = ("all", "caption", "count")
    pairs = [("hippo", 0.0), ("hippo", 0.9), ("random", 0.0), ("random", 0.9), ("none", 0.0), ("blind", 1.0)]
    assert rows == {(*pair, task) for pair in pairs for task in tasks}
    of_hippo = [row["ratio"] for row in content["results"] if row["strategy"] == "hippo"]
    assert of_hippo == sorted(of_hippo), "as the plot draws its lines"


def test_figures_are_paired_with_the_unpruned_draft_and_with_hippo() -> None:
    rows = {(row["strategy"], row["ratio"], row["task"]): row for row in rows_of(all_answers())}
    random = rows["random", 0.9, "caption"]
    assert (random["acceptance_rate"], random["ci_low"], random["ci_high"]) == (0.6, 0.6, 0.6)
    assert random["over_unpruned"].value == pytest.approx(0.6 / 0.9)
    assert random["less_than_hippo"].value == pytest.approx(0.2)
    assert random["num_tokens"] == 40
    assert rows["random", 0.0, "caption"]["over_unpruned"].value == 1.0


def test_one_clip_has_no_interval() -> None:
    report = report_of([each for each in all_answers() if each.clip == 0])
    for row in report.figures["results"]:
        assert (row["ci_low"], row["ci_high"], row["over_unpruned"].interval) == (None, None, None)
    assert "0.600 " in text_of(report)
    assert "0.600*" not in text_of(report)


def test_only_clips_that_both_have_are_compared() -> None:
    assert paired(difference, {0: (1, 1), 1: (0, 1)}, {0: (1, 1)}).value == 0.0


@pytest.mark.parametrize(
    ("matches", "accepted", "verifications"),
    [
        ([], 0, 0),
        ([1, 1, 1], 3, 1),
        ([0, 0, 0], 0, 3),
        ([1, 1, 0, 1], 3, 2),
        ([1] * 9, 8, 1),  # 8 accepted; the ninth is the target's
        ([1] * 10, 9, 2),
    ],
)
def test_accepted_tokens_follow_the_serial_schedule(matches: list[int], accepted: int, verifications: int) -> None:
    assert count_accepted([bool(hit) for hit in matches], 8) == (accepted, verifications)


def test_every_setting_is_measured_once_the_unpruned_first() -> None:
    found = list(pruning_configs(PruningOptions()))
    assert found[0] == PruningConfig(Preservation.NONE, 0.0)
    assert len(found) == len(set(found)) == 2 + 7 * 4
    assert PruningConfig(Preservation.BLIND, 1.0) in found
    assert len(laws_of(found)) == 2, "specvlm and attention share one"


def test_every_question_type_belongs_to_a_task() -> None:
    assert set(QUESTION_TASKS) == set(QUESTION_TYPES)
    clip_prompt = list(clip_prompts(0, tuple(PruningTask)))
    assert clip_prompt[0].task is PruningTask.CAPTION
    assert {each.task for each in clip_prompt} == set(PruningTask)
    assert {each.task for each in clip_prompts(0, (PruningTask.COUNT,))} == {PruningTask.COUNT}


def test_the_draft_that_starts_at_once_is_never_ready_later() -> None:
    line = time_line(first_token_s=2.0, relevance_s=0.1, draft_prepare_s=1.0, choice_s=0.1, draft_prefill_s=0.3)
    assert line["draft_ready_s"] == pytest.approx(1.4)
    assert line["draft_ready_if_it_waited_s"] == pytest.approx(2.5)
    assert line["draft_refined_s"] == pytest.approx(2.5)


def test_the_tables_name_every_strategy_the_machine_and_the_command() -> None:
    report = report_of(all_answers())
    text = text_of(report)
    named = ("hippo", "random", "none", "blind", "0.600", "baseline", report.hardware["cpu"])
    for word in named:
        assert word in text
    assert "0.600*" in text, "hippo is better beyond the interval"


def test_what_the_engine_made_of_captions_is_shown() -> None:
    def speed(_: PruningConfig, task: str, __: float) -> tuple[float, str]:
        return (4321.0, "engine") if task == PruningTask.CAPTION else (100.0, "speed model")

    shown = text_of(report_of(all_answers(), speed))
    assert "Captions in the engine" in shown
    assert shown.count("4321") == len([row for row in rows_of(all_answers()) if row["task"] == PruningTask.CAPTION])
    assert "Captions in the engine" not in text_of(report_of(all_answers()))


@pytest.mark.parametrize("num_clips", [1, 4])
def test_the_plot_is_written(tmp_path: Path, num_clips: int) -> None:
    assert draws(report_of([each for each in all_answers() if each.clip < num_clips]), tmp_path, "plot")


def test_the_engine_is_warmed_up_however_few_clips_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(PROMPT_READY, *(TextDelta(text="", num_tokens=1, ids=(token,)) for token in range(3)), FINISHED)
    monkeypatch.setattr(run, "new_engine", lambda _: nullcontext(engine))
    pair, config = EngineConfig(target=WorkerConfig(model="bundled")), PruningConfig(Preservation.HIPPO, 0.9)
    found = run.engine_speeds(PruningOptions(num_clips=1), pair, [config], lambda *_: None)
    assert (found[config] or 0) > 0
    assert len(engine.requests) == 3


@pytest.mark.parametrize("draft", [None, WorkerConfig(model="ngram")])
def test_a_pair_without_a_draft_model_is_refused(draft: WorkerConfig | None) -> None:
    with pytest.raises(ConfigError, match="bench pruning needs a draft model"):
        LoadedPair(EngineConfig(target=WorkerConfig(model="bundled"), draft=draft))
