"""Hardening must show the target what the service will show it: the same tokens merged, the same rows hidden."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET, SCENE_DURATION_S, slot_times
from vidspec_models.bundled.attributes import NUM_SLOTS
from vidspec_models.bundled.clip_batch import ClipBatch, make_clip_batch
from vidspec_models.bundled.compressed_view import Hiding, View, draw_view
from vidspec_models.bundled.export import export_pair
from vidspec_models.bundled.harden_stage import HardenStep
from vidspec_models.bundled.lm_forward import make_layout
from vidspec_models.bundled.options import TrainOptions
from vidspec_models.bundled.questions import CAPTION_PROMPTS
from vidspec_models.bundled.reopening import reopen
from vidspec_models.bundled.workers import GradientSum
from vidspec_models.compression.dycoke import DyCoke
from vidspec_models.compression.merging import merge_prompt
from vidspec_models.compression.pruner import KVPruner
from vidspec_models.inputs import Turn, Video
from vidspec_models.kv_cache import KVCache
from vidspec_models.loading import load_model
from vidspec_models.spec import ModelSpec
from vidspec_models.video_lm import StepRows

_SERVED = View(merge_ratio=0.5, hide_ratio=0.7, is_noisy=False)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> HardenStep:
    """The stage as it begins with the shipped pair."""
    work = tmp_path_factory.mktemp("work")
    options = TrainOptions(work_dir=work, output_dir=work, compile_models=False)
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    return HardenStep(options)


def _batch(step: HardenStep) -> ClipBatch:
    return make_clip_batch(step.forward.packer, 0, range(1), 168, greedy_text=True)


def _served_logits(batch: ClipBatch, prompt_text: str, ids: list[int]) -> torch.Tensor:
    """What the compressed target says before each id of the answer [n, V], row by row as it would be decoded."""
    model = load_model(ModelSpec(path=str(BUNDLED_TARGET), role="target", device="cpu", dtype="float32"))
    indices = tuple(int(time * 64) for time in slot_times())
    clip = Video(
        frames=batch.frames.numpy(), source_indices=indices, source_fps=16.0, source_num_frames=64,
        duration_s=SCENE_DURATION_S,
    )  # fmt: skip
    prompt = merge_prompt(model.prepare([Turn(role="user", text=prompt_text, num_videos=1)], [clip]), 0.5)
    geometry = model.decoder.geometry
    cache = KVCache(geometry, prompt.num_tokens + len(ids))
    logits = None
    while logits is None:
        logits = model.prefill(prompt, cache, 512)
    said = [logits]
    pruner = KVPruner.of(prompt, DyCoke(merge_ratio=0.5, layer=3, hide_ratio=0.7), geometry.num_layers)
    for number, token in enumerate(ids[:-1]):
        rows = StepRows(cache=cache, ids=[token], position=prompt.next_position + number, pruner=pruner)
        said.append(model.step([rows])[0][0])
    return torch.stack(said)


def test_a_caption_is_scored_as_the_compressed_service_scores_it(step: HardenStep) -> None:
    batch = _batch(step)
    rows = batch.is_caption[0].nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        features = step.tower(batch.frames, generator, is_noisy=False)
        logits, _ = step.seen(batch, features, _SERVED, generator)
    asked = batch.ids[0, : int(rows[0]) + 1].tolist()
    prompt = next(text for text in CAPTION_PROMPTS if step.forward.packer.prompt_ids(text) == asked)
    served = _served_logits(batch, prompt, batch.labels[0, rows].tolist())
    assert torch.allclose(logits[0, rows, : served.shape[1]], served, atol=2e-3)


@pytest.mark.parametrize(
    "view",
    [
        _SERVED,
        View(),
        View(most_tokens=96),
        View(num_frames=2 * NUM_SLOTS, merge_ratio=0.7, hide_ratio=0.5, layer=2, most_tokens=200),
    ],
)
def test_every_view_gives_gradients(step: HardenStep, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vidspec_models.bundled.harden_stage.draw_view", lambda *_: view)
    weight = step.target.lm.layers[0].mlp.up_proj.weight
    step.gradients = GradientSum([weight])
    figures = step.run_unit(slice(0, 1))
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert float(weight.grad.abs().sum()) > 0
    assert figures["kl"] >= 0
    weight.grad = None


def test_what_shows_something_is_neglected_until_it_outweighs_what_is_hidden() -> None:
    text = torch.zeros(1, 40, dtype=torch.long)
    layout = make_layout(torch.zeros(3, dtype=torch.long), torch.arange(8)[None], 8, (text, text, text))
    is_caption = torch.zeros(1, 40, dtype=torch.bool)
    is_caption[:, 5:30] = True
    worth = torch.tensor([[1.0, 8.0, 0, 0, 0, 0, 0, 0]])
    hiding = Hiding(layout, is_caption, worth, layer=3, num_seen=3)
    attention = torch.full((1, 2, 8), 0.1)
    attention[:, :, 0] = 0.4
    assert float(hiding.neglect(attention)) > 0
    attention[:, :, 1] = 0.3
    assert float(hiding.neglect(attention)) == 0
    hidden = hiding.close(torch.zeros(1, 1, layout.segments.shape[1], layout.segments.shape[1]), attention)[0, 0] < 0
    first = layout.text.start + 5 + 1
    assert hidden.nonzero()[:, 0].unique().tolist() == list(range(first, first + 25))
    assert (hidden[first:, layout.visual].sum(1)[:25] == 5).all()
    assert not hidden[first, 3:5].any()


def test_views_range_from_everything_to_thin_long_clips() -> None:
    generator = torch.Generator().manual_seed(0)
    views = [draw_view(generator, 0.3) for _ in range(400)]
    assert {view.num_frames for view in views} == {NUM_SLOTS, 2 * NUM_SLOTS}
    assert {view.layer for view in views} == {2, 3, 4}
    plain = [view for view in views if not view.merge_ratio and not view.hide_ratio]
    assert 0.1 < len(plain) / len(views) < 0.4
    assert all(0.5 <= view.hide_ratio < 0.8 for view in views if view.hide_ratio)


def test_a_hardened_target_is_what_later_stages_and_the_export_take(tmp_path: Path) -> None:
    options = TrainOptions(work_dir=tmp_path, output_dir=tmp_path / "out")
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    joint = torch.load(tmp_path / "joint.pt", weights_only=True)["parts"]
    joint["target"]["newline"] = joint["target"]["newline"] + 1
    torch.save({"parts": {"target": joint["target"]}}, tmp_path / "harden.pt")
    before = load_file(BUNDLED_TARGET / "model.safetensors")
    after = load_file(export_pair(options)[0] / "model.safetensors")
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["image_newline"]
