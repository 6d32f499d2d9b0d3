"""Particulars of single families beyond the exactness suite: time, frames from a window, unlisted types."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf

from tests.unit.models.families import tiny_checkpoints
from tests.unit.models.families.test_exactness import ANSWER, Greedy, clip, decode
from tests.unit.models.families.tiny_checkpoints import FAMILIES, load, save
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.errors import ContextOverflow, ModelLoadError
from vidspec_models.families.qwen_vl import sampled_fps
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec, find_family
from vidspec_models.reference.stock import StockGenerator
from vidspec_models.request import VIDEO, Turn
from vidspec_models.video_lm import StepRows

ASK = [Turn(role="user", parts=(VIDEO, "x"))]


def test_the_sampled_rate_is_the_processors_for_a_whole_source_and_the_windows_for_a_part() -> None:
    whole = clip(1)
    assert sampled_fps(whole) == pytest.approx(4 / 120 * 10.0)
    assert sampled_fps(replace(whole, source_num_frames=121)) == 4 / 121 * 10.0, "indices are rounded to frames"
    part = replace(whole, source_num_frames=100_000, source_indices=(5000, 5010, 5020, 5030))
    # 40 frames are in the part. qwen-vl-utils, with `video_start` and `video_end`: nframes / total_frames * video_fps.
    assert sampled_fps(part) == pytest.approx(4 / 40 * 10.0)
    densely = replace(clip(1, 40), source_fps=4.0, source_num_frames=80, source_indices=tuple(range(40)))
    assert sampled_fps(densely) == 4.0, "every frame of the first half"
    assert sampled_fps(clip(1, 1)) == pytest.approx(1 / 30 * 10.0)
    assert sampled_fps(replace(clip(1, 2), source_num_frames=9000, source_indices=(70, 70))) == 10.0


def test_qwen25_positions_follow_time_and_count_against_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("qwen2_5_vl", tmp_path)
    quick, slow = (model.prepare(ASK, [video]) for video in (clip(1), replace(clip(1), source_fps=1.0)))
    assert not torch.equal(quick.rotary[0], slow.rotary[0])
    slowest = replace(clip(1), source_fps=0.01)
    with pytest.raises(ContextOverflow, match="shorter part") as refused:
        model.prepare(ASK, [slowest])
    furthest = int(re.findall(r"reaches position (\d+)", str(refused.value))[0])
    monkeypatch.setattr(model.decoder, "context_length", furthest + 1)  # leaves no position to an answer
    with pytest.raises(ContextOverflow, match=f"reaches position {furthest}"):
        model.prepare(ASK, [slowest])
    monkeypatch.setattr(model.decoder, "context_length", furthest + 2)
    model.prepare(ASK, [slowest])


@pytest.mark.parametrize(("name", "num_frames"), [("qwen2_vl", 150), ("qwen2_5_vl", 4), ("qwen2_5_vl", 19)])
def test_an_answer_goes_on_behind_the_words_though_the_videos_time_has_run_ahead(
    name: str, num_frames: int, tmp_path: Path
) -> None:
    """transformers positions words after a video by its height and width; `generate` continues from the last word."""
    model = load(name, tmp_path)
    stock = StockGenerator(ModelSpec(role="target", path=str(tmp_path), device="cpu", dtype="float32"))
    long = replace(clip(4, num_frames), source_fps=2.0)
    prompt = model.prepare(ASK, [long])
    assert decode(model, Greedy(model, prompt, 4096)) == stock.answer(ASK, [long], ANSWER).ids


def test_qwen2_frames_never_take_more_than_the_cap_of_a_video(tmp_path: Path) -> None:
    save("qwen2_vl", tmp_path)
    processor = tf.AutoProcessor.from_pretrained(tmp_path)
    processor.video_processor.size = {"shortest_edge": 3136, "longest_edge": 12_845_056}  # an image's, as the hub has
    assert find_family("qwen2_vl")(None, processor).video_arguments()["size"]["longest_edge"] == 768 * 28 * 28


def test_an_odd_number_of_patches_makes_half_as_many_cells_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in released checkpoints of LLaVA-OneVision, whose frames have 27 rows of patches."""
    monkeypatch.setitem(tiny_checkpoints._CLIP, "image_size", 42)
    monkeypatch.setitem(tiny_checkpoints._CROP, "size", {"height": 42, "width": 42})
    assert load("llava_onevision", tmp_path).prepare(ASK, [clip(1)]).video_shapes == ((4, 2, 2),)


def test_qwen3_writes_the_time_of_each_pair(tmp_path: Path) -> None:
    model = load("qwen3_vl", tmp_path)
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.decode(model.prepare(ASK, [clip(1)]).ids)
    assert "<3.0 seconds>" in text
    assert "<9.0 seconds>" in text


def test_qwen3_repeats_a_frame_only_where_there_is_no_other_to_make_a_pair(tmp_path: Path) -> None:
    model = load("qwen3_vl", tmp_path)
    assert [model.encode(clip(1, num_frames)).num_frames for num_frames in (1, 2, 3)] == [1, 1, 2]


def test_an_unlisted_family_is_one_readable_error() -> None:
    with pytest.raises(ModelLoadError, match="not supported; supported: internvl, "):
        find_family("gemma3")


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_pad_the_vocabulary_are_no_tokens(name: str, tmp_path: Path) -> None:
    """Two checkpoints, padded to 288 and 320 rows: both choose only among the tokenizer's 268 tokens."""
    save(name, tmp_path / "narrow")
    save(name, tmp_path / "wide", loud_padding=True)
    narrow, wide = (
        load_model(ModelSpec(role="target", path=str(tmp_path / width), device="cpu", dtype="float32"))
        for width in ("narrow", "wide")
    )
    found = []
    for model in (narrow, wide):
        prompt = model.prepare(ASK, [clip(1)])
        cache = KVCache(model.decoder.geometry, prompt.num_tokens + 8)
        logits = model.prefill(prompt, cache, 4096)
        assert logits is not None
        rows = StepRows(cache=cache, ids=[int(logits.argmax()), 20, 21], position=prompt.next_position)
        found.append(torch.cat((logits[None], *model.step([rows]))))
    assert {len(each[0]) for each in found} == {268}
    assert torch.equal(found[0].argmax(-1), found[1].argmax(-1))
    uncut = wide.decoder.prompts.logits(torch.randn(64, wide.decoder.embedding.shape[1]))
    assert uncut.shape[1] == 320
    assert bool((uncut.argmax(-1) >= 268).any()), "the padding of the wide one would never have won"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_video_is_the_same_prompt_in_bfloat16(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    rough, exact = (
        load_model(ModelSpec(role="target", path=str(tmp_path), device="cpu", dtype=dtype))
        for dtype in ("bfloat16", "float32")
    )
    ours, wanted = (model.prepare(ASK, [clip(1)]) for model in (rough, exact))
    assert ours.ids == wanted.ids
    alike = torch.cosine_similarity(ours.embeddings.float().flatten(), wanted.embeddings.flatten(), dim=0)
    assert alike > 0.99
    assert decode(rough, Greedy(rough, ours, 4096))
