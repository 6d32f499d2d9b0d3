"""The pieces of training that can be wrong in silence: masks, positions, identity growth, the independence term."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.bundled.architecture import DRAFT_SIZE, VIDEO_TOKENS, build_tower
from vidspec_models.bundled.augment import normalise
from vidspec_models.bundled.clip_batch import make_clip_batch
from vidspec_models.bundled.dropping import choose_tokens, draft_visibility
from vidspec_models.bundled.export import export_pair
from vidspec_models.bundled.lm_forward import grow_layers
from vidspec_models.bundled.muon import Muon
from vidspec_models.bundled.options import TrainOptions
from vidspec_models.bundled.pair_forward import NUM_VISUAL, PairForward, build_learner
from vidspec_models.bundled.reopening import reopen
from vidspec_models.bundled.stage_run import StageRun
from vidspec_models.bundled.tokenizer import build_tokenizer
from vidspec_models.bundled.tower_stage import leak_ratio, make_tower_batch, tower_features
from vidspec_models.bundled.turns import TurnPacker


def test_a_packed_turn_scores_as_stock_transformers_does(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    packer = TurnPacker(tokenizer)
    model, learner = build_learner(DRAFT_SIZE, tokenizer.get_vocab(), 1)
    model.model.vision_tower.load_state_dict(build_tower(0).state_dict())
    batch = make_clip_batch(packer, 0, range(1), 200)
    generator = torch.Generator().manual_seed(0)
    keep = choose_tokens(batch.content, NUM_VISUAL, generator)
    forward = PairForward(packer, TrainOptions(work_dir=tmp_path, output_dir=tmp_path, compile_models=False))
    pixels = normalise(batch.frames)
    with torch.no_grad():
        features = tower_features(model.model.vision_tower, pixels)
        everything = torch.ones_like(keep, dtype=torch.bool)
        layers = list(learner.lm.layers)
        ours, _ = forward(learner, layers, features, keep, forward.layout(batch, keep), everything)
        turn = batch.segments[0] == 3
        video = [tokenizer.convert_tokens_to_ids("<video>")] * VIDEO_TOKENS
        ids = torch.tensor([[*packer.prefix, *video, *batch.ids[0][turn].tolist()]])
        stock = model(input_ids=ids, pixel_values_videos=pixels[None]).logits[0, -int(turn.sum()) :]
    assert torch.allclose(ours[0][turn], stock, atol=1e-4)


def test_a_reopened_pair_is_exported_as_it_was(tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path / "work", output_dir=tmp_path / "out")
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    for shipped, again in zip((BUNDLED_TARGET, BUNDLED_DRAFT), export_pair(options), strict=True):
        before, after = (load_file(folder / "model.safetensors") for folder in (shipped, again))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_grown_layers_change_nothing_at_first() -> None:
    tokenizer = build_tokenizer()
    _, learner = build_learner(DRAFT_SIZE, tokenizer.get_vocab(), 1)
    ids = torch.arange(12)[None]
    layers = learner.lm.layers
    with torch.no_grad():
        hidden = learner.lm.embed_tokens(ids)
        rotary = learner.lm.rotary_emb(hidden, ids)
        grow_layers(layers, [0, 2])
        mask = torch.zeros(1, 1, 12, 12)
        assert torch.equal(layers[1](hidden, attention_mask=mask, position_embeddings=rotary), hidden)


def test_chosen_tokens_keep_content_first_and_order() -> None:
    content = torch.zeros(2, NUM_VISUAL, dtype=torch.bool)
    content[:, 100:140] = True
    kept = choose_tokens(content, 64, torch.Generator().manual_seed(0))
    assert content.gather(1, kept).sum() == 80
    assert (kept.diff(dim=1) > 0).all()


def test_draft_views_range_from_nothing_to_everything() -> None:
    views = draft_visibility(torch.zeros(400, 96, dtype=torch.bool), 0.4, torch.Generator().manual_seed(0))
    share = views.float().mean(dim=1)
    assert 0.3 < (share == 1).float().mean() < 0.5
    assert 0.08 < (share == 0).float().mean() < 0.25


def test_leak_is_zero_for_equal_features_and_positive_for_others() -> None:
    full = torch.randn(4, 256, 8)
    clear = torch.ones(4, 256)
    assert leak_ratio(full, full.clone(), clear) == pytest.approx(0.0)
    assert float(leak_ratio(full, full[:2] + 1, clear)) > 0.5


def test_tower_batches_are_deterministic_and_labelled() -> None:
    one, two = make_tower_batch(0, 0), make_tower_batch(0, 0)
    assert torch.equal(one.frames, two.frames)
    assert {int(kind) for kind in one.labels["kind"].unique()} >= {0, 1}
    assert 0.5 < float(one.clear.mean()) < 1


def test_muon_steps_are_roughly_orthogonal() -> None:
    weight = torch.nn.Parameter(torch.zeros(16, 48))
    weight.grad = torch.randn(16, 48)
    Muon([weight], lr=1.0).step()
    singular = torch.linalg.svdvals(weight.detach() / (0.2 * 48**0.5))
    assert singular.min() > 0.4
    assert singular.max() < 1.8


def test_a_stage_resumes_its_clock_and_parts(tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path, output_dir=tmp_path, tower_minutes=0.0005)
    layer = torch.nn.Linear(2, 2)
    run = StageRun("tower", options, {"layer": layer})
    steps = list(run.steps())
    assert steps[0] == 0
    fresh = torch.nn.Linear(2, 2)
    again = StageRun("tower", options, {"layer": fresh})
    assert torch.equal(fresh.weight, layer.weight)
    assert again.step == len(steps)
    assert list(again.steps()) == []
