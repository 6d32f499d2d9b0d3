"""`bench compression`: what counts as right, what the figures are made of, the keys that others read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.unit.models.compression.prompts import video_prompt
from vidspec_models.bundled import caption, sample_scene
from vidspec_models.bundled.scene import BACKGROUND_NAMES
from vidspec_service.bench.compression.measuring import peak_rss_bytes, scene_clip
from vidspec_service.bench.compression.messages import Described
from vidspec_service.bench.compression.options import CompressionOptions, Configuration, Method
from vidspec_service.bench.compression.prefix import text_behind_video, with_text
from vidspec_service.bench.compression.report import CompressionReport, renderables
from vidspec_service.bench.compression.results import Measured, accuracy_change, results
from vidspec_service.bench.compression.scoring import Score, score_answer, score_caption
from vidspec_service.bench.facts import hardware
from vidspec_service.cli.bench_compression import compression_options, run
from vidspec_service.cli.parsing import UsageError, parse
from vidspec_service.cli.settings_flags import settings_of
from vidspec_service.engine.types import DyCoke
from vidspec_service.errors import ConfigError


def options(*flags: str) -> CompressionOptions:
    args = parse(["bench", "compression", *flags])[1]
    return compression_options(args, settings_of(args))


def test_without_flags_it_is_the_run_of_the_issue() -> None:
    assert options() == CompressionOptions()
    lines = [(one.frames, one.label) for one in options().configurations()]
    kinds = ["none", "ttm K=0.3", "ttm K=0.5", "ttm K=0.7", "dycoke K=0.3", "dycoke K=0.5", "dycoke K=0.7"]
    assert lines == [(frames, kind) for frames in (16, 64) for kind in kinds]


def test_flags_and_settings_become_parameters_of_each_method() -> None:
    flags = "--clips 3 --frames 4 --ratios 0.9 --max-tokens 9 --dycoke-layer 5 --dycoke-hide-ratio 0.4"
    found = options(*flags.split())
    assert (found.num_clips, found.max_tokens) == (3, 9)
    none, ttm, dycoke = (one.dycoke for one in found.configurations())
    assert (none.merge_ratio, none.hide_ratio) == (0, 0)
    assert (ttm.merge_ratio, ttm.hide_ratio) == (0.9, 0)
    assert dycoke == DyCoke(merge_ratio=0.9, layer=5, hide_ratio=0.4)


@pytest.mark.parametrize("flags", [["--ratios", "1"], ["--ratios", "0"], ["--frames", "0"], ["--clips", "none"]])
def test_a_wrong_flag_is_a_usage_error(flags: list[str]) -> None:
    with pytest.raises(UsageError, match="bench compression"):
        options(*flags)


def test_compression_for_all_configurations_is_refused() -> None:
    with pytest.raises(ConfigError, match="with and without"):
        options("--compression", "dycoke")


def test_a_folder_that_is_not_there_is_refused_before_measuring() -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        run(parse(["bench", "compression", "--json", "no/such/folder/out.json"])[1])


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
    assert [score_answer("red", text).right for text in ("red", " red ", "reddish", "red red", "")] == [1, 1, 0, 0, 0]


def test_a_clip_has_the_frames_that_were_asked_for_over_its_whole_time() -> None:
    clip = scene_clip(sample_scene(3), 80)
    assert clip.frames.shape == (80, 128, 128, 3)
    assert (clip.source_indices[0], clip.source_indices[-1]) == (0, 79)


def test_other_text_behind_a_video_leaves_its_rows_and_goes_on_from_its_positions() -> None:
    prompt = video_prompt(3, 2, 2)
    assert len(text_behind_video(prompt)) == 3

    class Positions:
        @staticmethod
        def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (positions.float().view(-1, 1, 1).expand(-1, 1, 4),) * 2

        @staticmethod
        def embed(ids: torch.Tensor) -> torch.Tensor:
            return ids.float()[:, None].expand(-1, 8)

    other = with_text(prompt, (7, 8, 9, 10), Positions())  # type: ignore[arg-type]
    assert other.ids == (*prompt.ids[:-3], 7, 8, 9, 10)
    assert torch.equal(other.embeddings[:-4], prompt.embeddings[:-3])
    assert other.rotary[0][-4:, 0, 0].tolist() == [prompt.next_position - 3 + i for i in range(4)]
    assert other.next_position == prompt.next_position + 1
    assert other.num_video_tokens == prompt.num_video_tokens
    assert other.layer_additions is not None
    assert not other.layer_additions[:, -4:].any()


def test_the_peak_is_of_this_process() -> None:
    assert 10 * 2**20 < peak_rss_bytes() < 2**40


def described(*, right: int, stored: int, prefill_s: float) -> Described:
    return Described(
        score=Score(right, 10), is_all_right=right == 10, prompt_tokens=100, video_tokens=90, num_tokens=11,
        prepare_s=1.0, prefill_s=prefill_s, decode_s=0.5, stored_bytes=stored, attended_bytes=stored // 2,
        peak_bytes=10**9 + stored,
    )  # fmt: skip


def measured() -> list[Measured]:
    """Merging: two facts of a clip fewer, half the bytes, a quarter of the prefill."""
    kinds = {Method.NONE: (9, 2000, 4.0), Method.TTM: (7, 1000, 1.0)}
    return [
        Measured(
            configuration=Configuration(method=method, frames=16, dycoke=DyCoke(merge_ratio=0.5, hide_ratio=0.0)),
            captions=[described(right=right, stored=stored, prefill_s=prefill_s)] * 3,
            questions=[Score(10, 10)] * 3,
        )
        for method, (right, stored, prefill_s) in kinds.items()
    ]


def test_the_figures_are_those_of_the_answers() -> None:
    none, ttm = results(measured())
    assert none.accuracy == pytest.approx(57 / 60)
    assert none.accuracy_change is none.speedup is none.kv_ratio is None
    assert ttm.accuracy_change == pytest.approx(-0.1)
    assert ttm.accuracy_change_interval == pytest.approx((-0.1, -0.1))
    assert (ttm.question_accuracy, ttm.caption_fact_accuracy) == pytest.approx((1.0, 0.7))
    assert ttm.time_per_output_token_s == pytest.approx(0.05)
    assert none.request_s == pytest.approx(1 + 4 + 0.5)
    assert ttm.speedup == pytest.approx(5.5 / 2.5)
    assert (ttm.kv_bytes, ttm.kv_attended_bytes, ttm.kv_ratio) == (1000, 500, 2.0)
    assert ttm.peak_rss_bytes == 10**9 + 1000


def test_one_clip_gives_no_interval_and_more_give_one_around_the_difference() -> None:
    assert accuracy_change([Score(1, 2)], [Score(2, 2)]) == (-0.5, None)
    ours, base = [Score(right, 10) for right in (3, 9, 5, 8)], [Score(7, 10)] * 4
    difference, interval = accuracy_change(ours, base)
    assert interval is not None
    assert interval[0] < difference < interval[1]


def report() -> CompressionReport:
    return CompressionReport(
        created="2026-01-01T00:00:00+00:00", command="vidspec bench compression", baseline="none: the same",
        hardware=hardware({}), versions={"vidspec": "0"}, model="bundled", device="cpu", dtype="float32", threads=2,
        clips=3, max_tokens=160, load_average_before=0.0, results=results(measured()),
    )  # fmt: skip


def test_the_json_has_the_keys_that_were_promised() -> None:
    found = json.loads(report().to_json())
    assert {"results", "hardware", "versions", "command", "baseline"} < set(found)
    for line in found["results"]:
        promised = "compression frames accuracy prefill_s time_per_output_token_s kv_bytes peak_rss_bytes"
        assert set(promised.split()) < set(line)
    assert [line["compression"] for line in found["results"]] == ["none", "ttm K=0.5"]


def test_the_table_names_hardware_versions_command_and_baseline() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=132)
    for renderable in renderables(report()):
        console.print(renderable, markup=False)
    for words in ("hardware", "versions", "command   vidspec", "baseline  none", "16 frames", "-10.0 (-10.0..-10.0)"):
        assert words in stream.getvalue()


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from vidspec_service.bench.compression.plot import save_plot

    save_plot(report(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
