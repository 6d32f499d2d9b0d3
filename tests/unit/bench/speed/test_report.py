"""The report: the published keys, the table, the plots, and the options of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from tests.unit.bench.reports import draws, text_of
from tests.unit.bench.speed.factories import costs, sample, stats
from vidspec_service.bench.common.report import Report
from vidspec_service.bench.common.scenes import CAPTION_PROMPT
from vidspec_service.bench.speed.activity import WorkerActivity
from vidspec_service.bench.speed.costs import typical_context
from vidspec_service.bench.speed.options import Mode, SpeedOptions, SpeedTask
from vidspec_service.bench.speed.report import draw_speedups, speed_report
from vidspec_service.bench.speed.run import Measurements
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.ipc.messages import Heartbeat

PAIR = EngineConfig(target=WorkerConfig(model="bundled"), draft=WorkerConfig(model="bundled"))
PACE_S = {Mode.HF: 0.02, Mode.OFF: 0.01, Mode.SERIAL: 0.005, Mode.PARALLEL: 0.0025, Mode.AUTO: 0.0025}
IDS = tuple(range(41))


def measured(modes: tuple[Mode, ...] = tuple(Mode), num_prompts: int = 3) -> Measurements:
    """Every mode at its own speed, with equal answers, the target busy all the time and the draft half of the time."""
    samples = [
        sample(mode, prompt, IDS, at=100.0 * prompt, per_token_s=PACE_S[mode], stats=stats(36, 32, 8))
        for prompt in range(num_prompts)
        for mode in modes
    ]
    alone, both = WorkerActivity(["target"]), WorkerActivity(["target", "draft"])
    for role, length in (("target", 1.0), ("draft", 0.5)):
        spans = tuple(
            (100.0 * prompt + 0.1, 100.0 * prompt + 0.1 + length * 0.1, 5 + prompt) for prompt in range(num_prompts)
        )
        for activity in (alone, both):
            activity.record(role, Heartbeat(cache_usage=0.0, busy_s=0.0, elapsed_s=1.0, until=1e9, forwards=spans))
    return Measurements(
        samples=samples,
        activities={mode: both if mode.needs_draft else alone for mode in modes if mode is not Mode.HF},
        round_trip={"p50_s": 0.00005, "p99_s": 0.0002, "num_exchanges": 2000},
        costs=costs(),
    )


def report(options: SpeedOptions) -> Report:
    return speed_report(options, PAIR, measured(options.modes))


def as_json(options: SpeedOptions) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report(options).to_json())
    return found


def test_the_json_has_the_keys_that_were_promised() -> None:
    found = as_json(SpeedOptions(num_prompts=3))
    assert {"cost_ratio", "identical", "prompts", "hardware", "versions", "command", "baseline", "models"} < set(found)
    assert list(found["modes"]) == ["hf", "off", "serial", "parallel", "auto"]
    for mode in found["modes"].values():
        assert {"tokens_per_s", "speedup_vs_off"} < set(mode)
    assert {"acceptance_rate", "mean_accepted_tokens", "predicted_speedup"} < set(found["modes"]["parallel"])
    assert found["cost_ratio"] == pytest.approx(10)
    assert found["identical"] is True
    assert found["prompts"] == 3
    assert len(found["samples"]) == 15


def test_the_figures_are_those_of_the_samples() -> None:
    found = as_json(SpeedOptions(num_prompts=3))
    modes, samples = found["modes"], found["samples"]
    told = [each for each in samples if each["mode"] == "parallel"]
    num_tokens = sum(each["num_tokens"] - each["num_first"] for each in told)
    assert num_tokens / sum(each["decode_s"] for each in told) == pytest.approx(400)
    assert [each["ttft_s"] for each in told] == pytest.approx([0.1] * 3)
    assert modes["off"]["tokens_per_s"] == pytest.approx(100)
    assert modes["parallel"]["tokens_per_s"] == pytest.approx(400)
    assert modes["parallel"]["speedup_vs_off"] == pytest.approx(4)
    assert modes["parallel"]["speedup_interval"] == pytest.approx([4, 4])
    assert modes["parallel"]["throughput_vs_off"] == pytest.approx((0.1 + 40 * 0.01) / (0.1 + 40 * 0.0025))
    assert modes["hf"]["speedup_vs_off"] == pytest.approx(0.5)
    assert modes["parallel"]["acceptance_rate"] == pytest.approx(32 / 36)
    assert modes["parallel"]["mean_accepted_tokens"] == 4
    for by in ("predicted", "predicted_by_steps"):
        assert modes["parallel"][f"{by}_reached"] == pytest.approx(4 / modes["parallel"][f"{by}_speedup"]), by
    assert modes["parallel"]["workers"]["draft"]["idle_ratio"] == pytest.approx(0.5)
    assert modes["off"]["workers"].keys() == {"target"}


def test_without_the_baseline_there_is_no_speed_up_and_at_once_no_prediction() -> None:
    alone = as_json(SpeedOptions(modes=(Mode.PARALLEL,)))
    assert alone["modes"]["parallel"]["speedup_vs_off"] is alone["modes"]["parallel"]["throughput_vs_off"] is None
    assert alone["modes"]["parallel"]["predicted_reached"] is None
    assert alone["identical"] is None
    assert alone["modes"]["parallel"]["predicted_by_steps_speedup"] is None
    several = as_json(SpeedOptions(concurrency=8))["modes"]["parallel"]
    assert several["predicted_speedup"] is several["predicted_by_steps_speedup"] is None


def test_answers_of_one_token_have_neither_a_speed_nor_an_acceptance_rate(tmp_path: Path) -> None:
    found = measured()
    found = replace(found, samples=[sample(Mode(each.mode), each.prompt, (7,)) for each in found.samples])
    short = speed_report(SpeedOptions(), PAIR, found)
    rows = json.loads(short.to_json())["modes"].values()
    for key in ("tokens_per_s", "speedup_vs_off", "acceptance_rate", "mean_accepted_tokens", "predicted_speedup"):
        assert [row[key] for row in rows] == [None] * len(Mode), key
    assert draws(short, tmp_path, "plot")


def test_the_table_names_models_and_baseline() -> None:
    text = text_of(report(SpeedOptions()))
    for words in ("target    bundled", "baseline  off:", "4.00x", "identical ids: yes, 100 %"):
        assert words in text


def test_a_target_that_no_draft_was_timed_beside_is_shown_once() -> None:
    found = replace(measured(), costs=replace(costs(), draft=None))
    text = text_of(speed_report(SpeedOptions(), PAIR, found))
    assert "target with all cores" in text
    assert "beside a busy draft" not in text


def test_other_ids_in_a_mode_of_the_engine_are_a_failure() -> None:
    options = SpeedOptions(modes=(Mode.OFF, Mode.PARALLEL))
    found = measured(options.modes)
    assert speed_report(options, PAIR, found).failure is None
    *others, last = found.samples
    other = replace(found, samples=[*others, replace(last, ids=IDS[:-1])])
    assert speed_report(options, PAIR, other).failure == "the modes did not give the same token ids"


def test_plots_are_written(tmp_path: Path) -> None:
    assert draws(report(SpeedOptions()), tmp_path, "plot", "timeline")


def test_the_plot_shows_no_speed_up_where_there_is_none() -> None:
    figure = Figure()
    draw_speedups(figure, as_json(SpeedOptions(modes=(Mode.PARALLEL,)))["modes"])
    assert [text.get_text() for text in figure.axes[0].texts] == ["-\n400 tok/s"]


def test_prompts_are_held_out_and_the_same_every_time() -> None:
    def texts(task: SpeedTask) -> list[str]:
        options = SpeedOptions(task=task)
        return [options.request(Mode.OFF, 0, prompt).turns[-1].text for prompt in range(4)]

    assert texts(SpeedTask.CAPTION) == [CAPTION_PROMPT] * 4
    assert SpeedOptions().request(Mode.OFF, 0, 0).videos[0].frames.shape == (8, 128, 128, 3)
    mixed = texts(SpeedTask.MIXED)
    assert mixed[0] == mixed[2] == CAPTION_PROMPT
    assert CAPTION_PROMPT not in mixed[1::2]
    assert texts(SpeedTask.QA) == texts(SpeedTask.QA)


def test_no_mode_can_repeat_what_another_has_answered_to_the_same_prompt() -> None:
    scopes = {SpeedOptions().request(mode, 0, prompt).cache_scope for mode in Mode for prompt in range(2)}
    assert len(scopes) == len(Mode)


def test_a_forward_is_timed_at_the_context_of_a_mean_answer() -> None:
    assert typical_context([sample(Mode.OFF, 0, IDS), sample(Mode.OFF, 1, IDS[:1])]) == 510
