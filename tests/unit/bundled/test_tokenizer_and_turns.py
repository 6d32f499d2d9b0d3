"""Tokenizer and packing: one token per attribute, any text survives, each turn is what a single chat would be."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from vidspec_models.bundled import caption, sample_scene
from vidspec_models.bundled.architecture import VIDEO_TOKENS
from vidspec_models.bundled.labels import IGNORE
from vidspec_models.bundled.tokenizer import VOCAB_SIZE, attribute_words, build_tokenizer
from vidspec_models.bundled.turns import TurnPacker


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def test_every_attribute_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) <= VOCAB_SIZE
    for word in attribute_words():
        for text in (word, f" {word}"):
            assert len(tokenizer(text).input_ids) == 1, text


@pytest.mark.parametrize("text", ["Où est le chat noir ?", "漢字 🙂", "a\n\n b\tc", "x" * 50, "<|im_star", "3.14"])
def test_any_text_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_packed_turn_is_the_chat_template_of_a_single_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    packer = TurnPacker(tokenizer)
    scene = sample_scene(5)
    packed = packer.pack(scene, 200, np.random.default_rng(0), greedy_text=True)
    first = packed.segments == 1
    text = tokenizer.decode(packed.ids[first])
    prompt = text.split("<|im_end|>")[0].strip()
    content = [{"type": "video"}, {"type": "text", "text": prompt}]
    chat = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": caption(scene, by_attribute_share=1)},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    assert tokenizer(rendered).input_ids == [
        *packer.prefix, tokenizer.convert_tokens_to_ids("<video>"), *packed.ids[first]
    ]  # fmt: skip
    assert packed.positions[first][0] == len(packer.prefix) + VIDEO_TOKENS


def test_labels_are_the_next_token_of_the_same_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    packed = TurnPacker(tokenizer).pack(sample_scene(8), 220, np.random.default_rng(1))
    labelled = np.flatnonzero(packed.labels != IGNORE)
    assert np.array_equal(packed.labels[labelled], packed.ids[labelled + 1])
    assert np.array_equal(packed.segments[labelled], packed.segments[labelled + 1])
    assert (packed.weights[labelled] > 0).all()
    assert packed.segments.max() > 5
