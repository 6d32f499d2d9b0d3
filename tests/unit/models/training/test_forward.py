"""The packed forward scores as stock transformers does, and growing a model changes nothing at first."""

from __future__ import annotations

import torch

from vidspec_models.training.architecture import NUM_VISUAL, VIDEO_TOKENS, build_model, build_tower
from vidspec_models.training.examples import ExamplePacker, choose_tokens, make_clip_batch
from vidspec_models.training.forward import Learner, PackedForward
from vidspec_models.training.tokenizer import build_tokenizer
from vidspec_models.training.tower import normalise, tower_features


def test_a_packed_example_scores_as_stock_transformers_does() -> None:
    tokenizer = build_tokenizer()
    packer = ExamplePacker(tokenizer)
    model = build_model("draft", tokenizer.get_vocab(), 1)
    learner = Learner(model)
    model.model.vision_tower.load_state_dict(build_tower(0).state_dict())
    batch = make_clip_batch(packer, 0, range(1), 320)
    generator = torch.Generator().manual_seed(0)
    keep = choose_tokens(batch.content, NUM_VISUAL, generator)
    forward = PackedForward(packer.prefix, "cpu", compile_layers=False)
    pixels = normalise(batch.frames)
    with torch.no_grad():
        features = tower_features(model.model.vision_tower, pixels)
        ours, _ = forward(learner, features, keep, batch.text)
        example = batch.text.segments[0] == 2
        video = [tokenizer.convert_tokens_to_ids("<video>")] * VIDEO_TOKENS
        ids = torch.tensor([[*packer.prefix, *video, *batch.text.ids[0][example].tolist()]])
        stock = model(input_ids=ids, pixel_values_videos=pixels[None]).logits[0, -int(example.sum()) :]
    assert torch.allclose(ours[0][example], stock, atol=1e-4)


def test_grown_layers_change_nothing_at_first() -> None:
    tokenizer = build_tokenizer()
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
