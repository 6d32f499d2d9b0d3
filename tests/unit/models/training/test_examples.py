"""Examples: each is what a single chat would be, and is labelled with its own next tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from vidspec_models.bundled.captions import caption
from vidspec_models.bundled.render import render_with_owners, slot_times
from vidspec_models.bundled.scene import sample_scene
from vidspec_models.training.architecture import NUM_VISUAL, VIDEO_TOKENS
from vidspec_models.training.examples import IGNORE, ExamplePacker, PackedText, choose_tokens, find_cells
from vidspec_models.training.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def _packed(packer: ExamplePacker, seed: int, length: int, *, greedy_text: bool = False) -> PackedText:
    drawn = packer.draw(sample_scene(seed), length, np.random.default_rng(1), greedy_text=greedy_text)
    return packer.pack([drawn], length)


def test_a_packed_example_is_the_chat_template_of_a_single_question(tokenizer: PreTrainedTokenizerFast) -> None:
    packer = ExamplePacker(tokenizer)
    packed = _packed(packer, 5, 200, greedy_text=True)
    first = packed.segments[0] == 1
    text = tokenizer.decode(packed.ids[0, first])
    prompt = text.split("<|im_end|>")[0].strip()
    content = [{"type": "video"}, {"type": "text", "text": prompt}]
    chat = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": caption(sample_scene(5), by_attribute_share=1)},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    video = tokenizer.convert_tokens_to_ids("<video>")
    assert tokenizer(rendered).input_ids == [*packer.prefix, video, *packed.ids[0, first].tolist()]
    assert packed.positions[0, first][0] == len(packer.prefix) + VIDEO_TOKENS


def test_labels_are_the_next_token_of_the_same_example(tokenizer: PreTrainedTokenizerFast) -> None:
    packed = _packed(ExamplePacker(tokenizer), 8, 220)
    labelled = (packed.labels[0] != IGNORE).nonzero()[:, 0]
    assert torch.equal(packed.labels[0, labelled], packed.ids[0, labelled + 1])
    assert torch.equal(packed.segments[0, labelled], packed.segments[0, labelled + 1])
    assert (packed.weights[0, labelled] > 0).all()
    assert packed.segments.max() > 5


def test_chosen_tokens_keep_content_first_and_order() -> None:
    content = torch.zeros(2, NUM_VISUAL, dtype=torch.bool)
    content[:, 100:140] = True
    kept = choose_tokens(content, 64, torch.Generator().manual_seed(0))
    assert content.gather(1, kept).sum() == 80
    assert (kept.diff(dim=1) > 0).all()


def test_strict_background_cells_keep_their_distance() -> None:
    for seed in range(20):
        _, owners = render_with_owners(sample_scene(seed), slot_times())
        cells = find_cells(owners)
        assert not (cells.is_strict_background & ~cells.is_clear).any()
        for t, row, column in np.argwhere(cells.is_strict_background)[::37]:
            y, x = row * 16, column * 16
            assert not owners[t, max(y - 4, 0) : y + 20, max(x - 4, 0) : x + 20].any()
