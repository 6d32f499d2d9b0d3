"""Hardening must show the target the same input as the service: the same tokens merged, the same rows hidden."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from vidspec_models.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from vidspec_models.bundled.render import slot_times
from vidspec_models.bundled.scene import NUM_SLOTS, SCENE_DURATION_S
from vidspec_models.compression import DyCoke
from vidspec_models.compression.dycoke import KVPruner, temporal_token_merging
from vidspec_models.compression.token_selector import TokenSelector
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import VIDEO, Turn, Video
from vidspec_models.training.architecture import FRAME_COUNTS
from vidspec_models.training.examples import ClipBatch, PackedText, make_clip_batch
from vidspec_models.training.export import reopen
from vidspec_models.training.forward import make_layout
from vidspec_models.training.harden import DyCokeMask, HardenStage, View, draw_view
from vidspec_models.training.options import TrainOptions
from vidspec_models.video_lm import StepRows, VideoHandling

pytestmark = pytest.mark.slow
_SERVED = View(merge_ratio=0.5, hide_ratio=0.7, is_noisy=False)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> HardenStage:
    """The stage at its start from the shipped pair."""
    work = tmp_path_factory.mktemp("work")
    options = TrainOptions(work_dir=work, output_dir=work, compile_models=False)
    reopen(BUNDLED_TARGET, BUNDLED_DRAFT, options)
    return HardenStage(options)


def _batch(stage: HardenStage) -> ClipBatch:
    """A clip whose caption is asked for first, without a system message."""
    drawn = (make_clip_batch(stage.packer, 0, range(clip, clip + 1), 168, greedy_text=True) for clip in range(50))
    num_before = len(stage.packer.prefix)
    return next(
        each
        for each in drawn
        if each.text.prefix.shape[1] == num_before and each.text.examples[each.text.is_caption].tolist()[:1] == [1]
    )


def _served_logits(batch: ClipBatch, prompt_text: str, ids: list[int]) -> torch.Tensor:
    """The compressed target's logits [n, V] before each id of the answer, computed row by row as in decoding."""
    model = load_model(ModelSpec(path=str(BUNDLED_TARGET), role="target", device="cpu", dtype="float32"))
    indices = tuple(int(time * 64) for time in slot_times())
    clip = Video(
        frames=batch.frames.numpy(), source_indices=indices, source_fps=16.0, source_num_frames=64,
        duration_s=SCENE_DURATION_S,
    )  # fmt: skip
    merging = TokenSelector(method="ttm", ratio=0.625, select=partial(temporal_token_merging, merge_ratio=0.5))
    prompt = model.prepare(
        [Turn(role="user", parts=(VIDEO, prompt_text))], [clip], handling=VideoHandling(selector=merging)
    )
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


def test_a_caption_is_scored_as_the_compressed_service_scores_it(stage: HardenStage) -> None:
    batch = _batch(stage)
    rows = batch.text.is_caption[0].nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        features = stage.tower(batch.frames, generator, is_noisy=False)
        logits, _ = stage.seen(batch, features, _SERVED, generator)
    asked = batch.text.ids[0, : int(rows[0]) + 1].tolist()
    prompt = stage.tokenizer.decode(asked).split("<|im_end|>")[0].strip()
    served = _served_logits(batch, prompt, batch.text.labels[0, rows].tolist())
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
def test_every_view_gives_gradients(stage: HardenStage, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vidspec_models.training.harden.draw_view", lambda *_: view)
    weight = stage.target.lm.layers[0].mlp.up_proj.weight
    loss, figures = stage.loss(range(1), stage.phases[0], torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(loss, [weight])
    assert gradient.isfinite().all()
    assert float(gradient.abs().sum()) > 0
    assert figures["kl"] >= 0


def test_what_shows_something_is_neglected_until_it_outweighs_what_is_hidden() -> None:
    text = torch.zeros(1, 40, dtype=torch.long)
    layout = make_layout(torch.arange(8)[None], 8, PackedText(text[:, :3], *[text] * 12))
    is_caption = torch.zeros(1, 40, dtype=torch.bool)
    is_caption[:, 5:30] = True
    worth = torch.tensor([[1.0, 8.0, 0, 0, 0, 0, 0, 0]])
    mask = DyCokeMask(layout, is_caption, worth, layer=3, num_seen=3)
    attention = torch.full((1, 2, 8), 0.1)
    attention[:, :, 0] = 0.4
    assert float(mask.neglect(attention)) > 0
    attention[:, :, 1] = 0.3
    assert float(mask.neglect(attention)) == 0
    hidden = mask.close(torch.zeros(1, 1, layout.segments.shape[1], layout.segments.shape[1]), attention)[0, 0] < 0
    first = layout.text.start + 5 + 1
    assert hidden.nonzero()[:, 0].unique().tolist() == list(range(first, first + 25))
    assert (hidden[first:, layout.visual].sum(1)[:25] == 5).all()
    assert not hidden[first, 3:5].any()


def test_views_range_from_everything_to_thin_long_clips() -> None:
    generator = torch.Generator().manual_seed(0)
    views = [draw_view(generator) for _ in range(400)]
    assert {view.num_frames for view in views} == set(FRAME_COUNTS)
    assert {view.layer for view in views} == {2, 3, 4}
    plain = [view for view in views if not view.merge_ratio and not view.hide_ratio]
    assert 0.4 < len(plain) / len(views) < 0.7
    assert all(0.5 <= view.hide_ratio < 0.8 for view in views if view.hide_ratio)
