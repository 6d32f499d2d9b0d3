"""The packed forward gives stock transformers' logits, and growing a model changes nothing at first."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from vidspec_models.training.architecture import CELLS, FRAME_COUNTS, NUM_VISUAL, build_model, build_tower
from vidspec_models.training.examples import ExamplePacker, choose_tokens, make_clip_batch
from vidspec_models.training.forward import Learner, PackedForward
from vidspec_models.training.tower import normalise, tower_features


class World:
    """An untrained draft, run by stock transformers and by the training code."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.packer = ExamplePacker(tokenizer)
        self.model = build_model("draft", tokenizer.get_vocab(), 1)
        self.learner = Learner(self.model)
        self.model.model.vision_tower.load_state_dict(build_tower(0).state_dict())
        self.forward = PackedForward(compile_layers=False)
        self._video = tokenizer.convert_tokens_to_ids("<video>")

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        return tower_features(self.model.model.vision_tower, pixels)

    def stock(self, prefix: torch.Tensor, text: list[int], videos: torch.Tensor) -> torch.Tensor:
        """Logits [L, V] of the text after a prefix [P] and videos [N, frames, 3, 128, 128]."""
        shown = [self._video] * (videos.shape[0] * (videos.shape[1] * CELLS + 1))
        ids = torch.tensor([[*prefix.tolist(), *shown, *text]])
        logits: torch.Tensor = self.model(input_ids=ids, pixel_values_videos=videos).logits[0, -len(text) :]
        return logits


@pytest.mark.parametrize("num_frames", FRAME_COUNTS)
@torch.no_grad()
def test_a_packed_example_scores_as_stock_transformers_does(
    tokenizer: PreTrainedTokenizerFast, num_frames: int
) -> None:
    world = World(tokenizer)
    batch = make_clip_batch(world.packer, 0, range(5, 6), 320, num_frames=num_frames)
    keep = choose_tokens(batch.content, num_frames * CELLS, torch.Generator().manual_seed(0))
    pixels = normalise(batch.frames)
    ours, _ = world.forward(world.learner, world.features(pixels), keep, batch.text)
    example = batch.text.segments[0] == 2
    stock = world.stock(batch.text.prefix[0], batch.text.ids[0][example].tolist(), pixels[None])
    assert torch.allclose(ours[0][example], stock, atol=1e-4)


@torch.no_grad()
def test_a_question_about_two_clips_scores_as_stock_transformers_does(tokenizer: PreTrainedTokenizerFast) -> None:
    world = World(tokenizer)
    batch = make_clip_batch(world.packer, 0, range(2), 64)
    keep = choose_tokens(batch.content, NUM_VISUAL, torch.Generator().manual_seed(0))
    pixels = normalise(batch.frames)
    text = world.packer.pack([[world.packer.example("Which one?", "the first")]] * 2, 40)
    ours = world.forward.side_by_side(world.learner, world.features(pixels), keep, text)
    example = text.segments[0] == 1
    stock = world.stock(text.prefix[0], text.ids[0][example].tolist(), pixels.unflatten(0, (2, -1)))
    assert torch.allclose(ours[0][example], stock, atol=1e-4)


def test_grown_layers_change_nothing_at_first(tokenizer: PreTrainedTokenizerFast) -> None:
    learner = Learner(build_model("draft", tokenizer.get_vocab(), 1))
    learner.used = [0, 2]
    ids = torch.arange(12)[None]
    layers = learner.lm.layers
    with torch.no_grad():
        hidden = learner.lm.embed_tokens(ids)
        rotary = learner.lm.rotary_emb(hidden, ids)
        learner.grow()
        mask = torch.zeros(1, 1, 12, 12)
        assert learner.layers == list(layers)
        assert torch.equal(layers[1](hidden, attention_mask=mask, position_embeddings=rotary), hidden)
