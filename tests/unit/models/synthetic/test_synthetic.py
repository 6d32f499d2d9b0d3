"""Random models: as large as the real ones, created in place, with an oracle of the requested acceptance rate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.reference.measure import main as measure
from vidspec_models.reference.stock import load_stock
from vidspec_models.request import SamplingParams, Turn
from vidspec_models.sampling import CoupledSampler
from vidspec_models.synthetic.model import OracleDraft, oracle_tokens, random_language_model
from vidspec_models.synthetic.recipe import SHAPES, Oracle, Recipe, find_recipe, prompt_text
from vidspec_models.video_lm import StepRows, VideoLM

ASKED = [Turn(role="user", parts=(prompt_text(3),))]


def spec_of(folder: Path, role: str, dtype: str = "float32") -> ModelSpec:
    return ModelSpec(path=str(folder / role), role=role, device="cpu", dtype=dtype)


def load(folder: Path, role: str, oracle: Oracle | None = None, dtype: str = "float32", pair: str = "tiny") -> VideoLM:
    Recipe(pair=pair, role=role, oracle=oracle).write(folder / role)
    return load_model(spec_of(folder, role, dtype))


def answer(model: VideoLM, num_tokens: int) -> list[int]:
    """Greedy ids of prompt 3, prefilled in two chunks."""
    prompt = model.prepare(ASKED, [])
    cache = KVCache(model.decoder.geometry, prompt.num_tokens + num_tokens)
    model.prefill(prompt, cache, 20)
    logits = model.prefill(prompt, cache, prompt.num_tokens)
    assert logits is not None
    ids = [int(logits.argmax())]
    while len(ids) < num_tokens:
        position = prompt.next_position + len(ids) - 1
        ids.append(int(model.step([StepRows(cache=cache, ids=ids[-1:], position=position)])[0][-1].argmax()))
    return ids


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_shape_has_the_numbers_that_it_says(name: str, role: str) -> None:
    shape = Recipe(pair=name, role=role).shape
    model = random_language_model(shape, 0, torch.device("meta"), torch.bfloat16)
    parameters = list(model.parameters())
    assert sum(parameter.numel() for parameter in parameters) == shape.parameters()
    assert {(parameter.dtype, parameter.device.type) for parameter in parameters} == {(torch.bfloat16, "meta")}


def test_prompts_have_32_frames_of_196_tokens() -> None:
    assert {SHAPES[name].video_tokens for name in SHAPES if name not in ("small", "tiny")} == {6272}


def test_a_recipe_is_read_as_it_was_written(tmp_path: Path) -> None:
    recipe = Recipe(pair="tiny", role="draft", seed=4, oracle=Oracle(acceptance=0.5, seed=1, references="r.json"))
    recipe.write(tmp_path)
    assert find_recipe(str(tmp_path)) == recipe
    assert find_recipe("llava-hf/llava-onevision-qwen2-7b-ov-hf") is None


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_engines_random_model_says_what_stock_generate_says(tmp_path: Path, dtype: str) -> None:
    model = load(tmp_path, "target", dtype=dtype)
    stock = load_stock(spec_of(tmp_path, "target", dtype)).answer(ASKED, [], 12, SamplingParams())
    assert answer(model, 12) == list(stock.ids)
    assert model.decoder.dtype_name == dtype
    assert len(stock.token_times) == 12
    assert stock.prompt_tokens == SHAPES["tiny"].prompt_tokens


def test_a_random_model_refuses_other_questions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt 0"):
        load(tmp_path, "target").prepare([Turn(role="user", parts=("What is this?",))], [])


@given(st.lists(st.integers(0, 99), min_size=1, max_size=50), st.floats(0, 1), st.integers(0, 9), st.integers(0, 9))
def test_a_told_token_is_the_reference_or_another_of_the_drafts(
    reference: list[int], acceptance: float, seed: int, index: int
) -> None:
    told = oracle_tokens(reference, acceptance, seed, index, 90)
    assert told == oracle_tokens(reference, acceptance, seed, index, 90)
    assert len(told) == len(reference)
    assert all(0 <= token < 90 for token in told)
    assert oracle_tokens(reference, 1.0, seed, index, 100) == tuple(reference)
    assert not any(
        one == other for one, other in zip(oracle_tokens(reference, 0.0, seed, index, 100), reference, strict=True)
    )


def test_an_oracle_is_right_as_often_as_asked() -> None:
    reference = list(range(100)) * 100
    told = oracle_tokens(reference, 0.8, 0, 0, 100)
    right = sum(one == other for one, other in zip(told, reference, strict=True)) / len(reference)
    assert right == pytest.approx(0.8, abs=0.02)


def test_a_draft_says_what_its_oracle_tells_it(tmp_path: Path) -> None:
    reference = list(range(100, 130))
    file = tmp_path / "references.json"
    oracle = Oracle(acceptance=0.6, seed=7, references=str(file))
    model = load(tmp_path, "draft", oracle)
    assert isinstance(model, OracleDraft)
    file.write_text(json.dumps({"3": reference}))  # written after loading, as in a run
    told = oracle_tokens(reference, 0.6, 7, 3, SHAPES["tiny"].draft.num_tokens)
    assert answer(model, 30)[1:] == list(told[1:])  # the first token comes from prefill, which proposes nothing


def test_a_draft_says_it_in_one_go_too(tmp_path: Path) -> None:
    """For a draft with kernels that make several tokens; it proposes nothing beyond the reference."""
    reference, file = list(range(100, 106)), tmp_path / "references.json"
    file.write_text(json.dumps({"3": reference}))
    model = load(tmp_path, "draft", Oracle(acceptance=0.6, seed=7, references=str(file)), pair="small")
    prompt = model.prepare(ASKED, [])
    cache = KVCache(model.decoder.geometry, prompt.num_tokens + 8)
    model.prefill(prompt, cache, prompt.num_tokens)
    told = oracle_tokens(reference, 0.6, 7, 3, SHAPES["small"].draft.num_tokens)
    rows = StepRows(cache=cache, ids=[told[0]], position=prompt.next_position)
    (proposed,) = model.propose([(rows, CoupledSampler(SamplingParams()), told[:1])], 7)
    assert len(proposed) == 7
    assert [each.token for each in proposed[:5]] == list(told[1:])


def test_a_draft_computes_a_prompt_that_its_oracle_knows_nothing_of(tmp_path: Path) -> None:
    """A worker measures its memory with such a prompt."""
    model = load(tmp_path, "draft", Oracle(acceptance=0.6, seed=7, references=str(tmp_path / "none.json")))
    prompt = model.prepare(ASKED, [])
    unknown = replace(prompt, ids=(0,) * prompt.num_tokens)
    cache = KVCache(model.decoder.geometry, unknown.num_tokens)
    assert model.prefill(unknown, cache, unknown.num_tokens) is not None


def test_a_device_can_be_measured_without_the_service() -> None:
    found = measure(
        ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--max-tokens", "24", "--repeats", "2"]
    )
    assert found["first_difference"] is None  # the engine's target gave the text of `generate`
    assert set(found["target"]["step_s"]) == {1, 2, 4, 9, 17}
    assert found["off_over_generate"] > 0
    assert found["target"]["roofline_fraction"] > 0
