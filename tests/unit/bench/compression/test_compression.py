"""`bench compression`: which answers count as right, how figures are computed, and the published keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.bench.reports import draws, text_of
from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.scene import BACKGROUND_NAMES, sample_scene
from vidspec_service.bench.common.environment import Placement
from vidspec_service.bench.common.options import options_from_args
from vidspec_service.bench.common.report import Report, Row
from vidspec_service.bench.compression.options import CompressionConfig, CompressionOptions, Method
from vidspec_service.bench.compression.report import compression_report, results
from vidspec_service.bench.compression.run import ConfigResult, Score, score_answers, score_caption
from vidspec_service.bench.compression.target import choice_of, peak_rss_bytes
from vidspec_service.cli.bench import pair_of
from vidspec_service.cli.parsing import parse
from vidspec_service.engine.config import DyCoke


def options(*flags: str) -> CompressionOptions:
    args = parse(["bench", "compression", *flags])[1]
    return options_from_args(CompressionOptions, args, dycoke=pair_of(args).dycoke)


def test_without_flags_it_is_the_run_of_the_issue() -> None:
    assert options() == CompressionOptions()
    assert options("--frames", "4", "2", "4").frames == (4, 2)
    lines = [(one.frames, one.label) for one in options().configs()]
    kinds = ["none", *(f"{method} {share}" for method in tuple(Method)[1:] for share in ("25%", "50%"))]
    assert lines == [(frames, kind) for frames in (8, 16, 64) for kind in kinds]


def test_flags_and_settings_become_parameters_of_each_method() -> None:
    flags = "--clips 3 --frames 4 --ratios 0.4 --methods ttm dycoke ttm --max-tokens 9 --dycoke-layer 5"
    found = options(*flags.split(), "--dycoke-hide-ratio", "0.4")
    assert (found.num_clips, found.max_tokens) == (3, 9)
    none, ttm, dycoke = found.configs()
    assert (none.ratio, none.dycoke) == (1, None)
    assert (ttm.ratio, ttm.dycoke) == (0.4, None)
    assert (dycoke.ratio, dycoke.dycoke) == (0.4, DyCoke(layer=5, hide_ratio=0.4))


def test_every_method_chooses_what_it_is_named_after() -> None:
    found = torch.randn(4, 25, 6, generator=torch.Generator().manual_seed(0))
    chosen = {}
    for method in Method:
        selector = choice_of(CompressionConfig(method=method, frames=4, ratio=0.4))
        if selector is not None and selector.select is not None:
            assert selector.ratio == pytest.approx(0.4)
            chosen[method] = selector.select(found)
    assert set(chosen) == set(Method) - {Method.NONE, Method.EARLYTOM}  # EarlyTom chooses inside the tower
    assert torch.equal(chosen.pop(Method.TTM), chosen[Method.DYCOKE])  # they differ only during decoding
    assert {int(kept.sum()) for kept in chosen.values()} <= {39, 40, 41}
    assert len({tuple(kept.flatten().tolist()) for kept in chosen.values()}) == len(chosen)
    gaps = chosen[Method.UNIFORM].flatten().nonzero()[:, 0].diff()
    assert set(gaps.tolist()) == {2, 3}


@pytest.mark.parametrize("seed", range(12))
def test_the_true_caption_has_every_fact_and_nonsense_none(seed: int) -> None:
    scene = sample_scene(seed)
    right = score_caption(scene, caption(scene))
    assert right.right == right.asked == 4 + 8 * len(scene.things)
    assert score_caption(scene, "I see nothing.") == Score(0, right.asked)


def test_a_caption_with_one_wrong_fact_has_all_the_others() -> None:
    scene = sample_scene(0)
    truth = caption(scene)
    other = next(name for name in BACKGROUND_NAMES if name != scene.background)
    wrong = truth.replace(f"{scene.texture} {scene.background}", f"{scene.texture} {other}")
    assert wrong != truth
    found = score_caption(scene, wrong)
    assert found.right == found.asked - 1


def test_a_question_is_answered_by_its_word_alone() -> None:
    assert score_answers(["red", "red"], ["red", " red "]) == Score(2, 2)
    assert score_answers(["red"] * 3, ["reddish", "red red", ""]) == Score(0, 3)


def test_the_peak_is_of_this_process() -> None:
    assert 10 * 2**20 < peak_rss_bytes() < 2**40


def described(*, right: int, stored: int, prefill_s: float) -> Row:
    return {
        "score": Score(right, 10),
        "prompt_tokens": 100,
        "video_tokens": 90,
        "num_tokens": 11,
        "prepare_s": 1.0,
        "prefill_s": prefill_s,
        "decode_s": 0.5,
        "stored_bytes": stored,
        "attended_bytes": stored // 2,
        "peak_bytes": 10**9 + stored,
    }


def measured() -> list[ConfigResult]:
    """Results in which merging loses two facts of a clip, halves the bytes and takes a quarter of the prefill time."""
    kinds = {Method.NONE: (9, 2000, 4.0), Method.TTM: (7, 1000, 1.0)}
    return [
        ConfigResult(
            config=CompressionConfig(method=method, frames=16, ratio=0.5),
            captions=[described(right=right, stored=stored, prefill_s=prefill_s)] * 3,
            questions=[Score(10, 10)] * 3,
        )
        for method, (right, stored, prefill_s) in kinds.items()
    ]


def test_the_figures_are_those_of_the_answers() -> None:
    none, ttm = results(measured())
    assert none["accuracy"] == pytest.approx(57 / 60)
    assert none["accuracy_change"] is none["speedup"] is none["kv_ratio"] is None
    assert ttm["accuracy_change"] == pytest.approx(-0.1)
    assert ttm["accuracy_change_interval"] == pytest.approx((-0.1, -0.1))
    assert (ttm["question_accuracy"], ttm["caption_fact_accuracy"]) == pytest.approx((1.0, 0.7))
    assert ttm["time_per_output_token_s"] == pytest.approx(0.05)
    assert none["request_s"] == pytest.approx(1 + 4 + 0.5)
    assert ttm["speedup"] == pytest.approx(5.5 / 2.5)
    assert (ttm["kv_bytes"], ttm["kv_attended_bytes"], ttm["kv_ratio"]) == (1000, 500, 2.0)
    assert ttm["peak_rss_bytes"] == 10**9 + 1000


def test_each_is_compared_with_the_baseline_of_as_many_frames() -> None:
    def at_8_frames(one: ConfigResult) -> ConfigResult:
        captions = [{**each, "num_tokens": 99, "prefill_s": 9.0, "stored_bytes": 7} for each in one.captions]
        return replace(one, config=replace(one.config, frames=8), captions=captions)

    assert results([*map(at_8_frames, measured()), *measured()])[2:] == results(measured())


def test_captions_of_one_token_have_no_time_per_token() -> None:
    short = [replace(one, captions=[{**each, "num_tokens": 1} for each in one.captions]) for one in measured()]
    assert [row["time_per_output_token_s"] for row in results(short)] == [None, None]


def test_one_clip_gives_no_interval() -> None:
    one_clip = [replace(one, captions=one.captions[:1], questions=one.questions[:1]) for one in measured()]
    _, ttm = results(one_clip)
    assert ttm["accuracy_change"] == pytest.approx(-0.1)
    assert ttm["accuracy_change_interval"] is None


def report() -> Report:
    placement = Placement(device="cpu", dtype="float32")
    return compression_report(CompressionOptions(frames=(16,)), measured(), placement, "bundled", 2)


def test_the_json_has_the_keys_that_were_promised() -> None:
    found = json.loads(report().to_json())
    assert {"results", "hardware", "versions", "command", "baseline"} < set(found)
    for line in found["results"]:
        promised = "compression frames accuracy prefill_s time_per_output_token_s kv_bytes peak_rss_bytes"
        assert set(promised.split()) < set(line)
    assert [line["compression"] for line in found["results"]] == ["none", "ttm 50%"]
    assert "-10.0 (-10.0..-10.0)" in text_of(report())


def test_a_plot_is_written(tmp_path: Path) -> None:
    assert draws(report(), tmp_path, "plot")
