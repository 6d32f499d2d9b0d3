"""What single families do beyond the exactness suite: time, frames from a window, refused decoders, unlisted types."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf

from tests.unit.models.families.test_exactness import clip
from tests.unit.models.families.tiny_checkpoints import save
from vidspec_models.decoder import Decoder
from vidspec_models.errors import ContextOverflow, ModelLoadError
from vidspec_models.families.qwen_vl import sampled_fps
from vidspec_models.inputs import Turn
from vidspec_models.loading import load_model
from vidspec_models.registry import find_family
from vidspec_models.spec import ModelSpec
from vidspec_models.video_lm import VideoLM

ASK = [Turn(role="user", text="x", num_videos=1)]


def load(name: str, folder: Path) -> VideoLM:
    save(name, folder)
    return load_model(ModelSpec(role="target", path=str(folder), device="cpu", dtype="float32"))


def test_the_sampled_rate_is_the_processors_for_a_whole_source_and_the_windows_for_a_part() -> None:
    whole = clip(1)
    assert sampled_fps(whole) == pytest.approx(4 / 120 * 10.0)
    part = replace(whole, source_num_frames=100_000, source_indices=(5000, 5010, 5020, 5030))
    assert sampled_fps(part) == pytest.approx(1.0)
    assert sampled_fps(clip(1, 1)) == pytest.approx(1 / 30 * 10.0)
    assert sampled_fps(replace(clip(1, 2), source_num_frames=9000, source_indices=(70, 70))) == 10.0


def test_qwen25_positions_follow_time_and_count_against_the_context(tmp_path: Path) -> None:
    model = load("qwen2_5_vl", tmp_path)
    quick, slow = clip(1), replace(clip(1), source_fps=1.0, duration_s=120.0)
    assert model.prepare(ASK, [quick]).next_position < model.prepare(ASK, [slow]).next_position
    assert model.prepare(ASK, [slow]).context_used > model.prepare(ASK, [slow]).num_tokens
    with pytest.raises(ContextOverflow, match="shorter part"):
        model.prepare(ASK, [replace(clip(1), source_fps=0.01)])


def test_qwen2_frames_never_take_more_than_the_cap_of_a_video(tmp_path: Path) -> None:
    save("qwen2_vl", tmp_path)
    processor = tf.AutoProcessor.from_pretrained(tmp_path)
    processor.video_processor.size = {"shortest_edge": 3136, "longest_edge": 12_845_056}  # an image's, as on the hub
    assert find_family("qwen2_vl").video_arguments(processor)["size"]["longest_edge"] == 768 * 28 * 28


def test_qwen3_writes_the_time_of_each_pair(tmp_path: Path) -> None:
    model = load("qwen3_vl", tmp_path)
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.decode(model.prepare(ASK, [clip(1)]).ids)
    assert "<3.0 seconds>" in text
    assert "<9.0 seconds>" in text


def test_a_sliding_window_is_refused() -> None:
    config = tf.MistralConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    config.num_key_value_heads, config.sliding_window = 2, 64
    model = tf.MistralForCausalLM(config)
    with torch.inference_mode(), pytest.raises(ModelLoadError, match="sliding-window"):
        Decoder(model.model, model.lm_head, 64)


def test_an_unlisted_family_is_one_readable_error() -> None:
    with pytest.raises(ModelLoadError, match="not supported; supported: internvl, "):
        find_family("gemma3")
