"""Tokenizer: one token per attribute, any text survives."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from vidspec_models.training.tokenizer import VOCAB_SIZE, attribute_words


def test_every_attribute_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) <= VOCAB_SIZE
    for word in attribute_words():
        for text in (word, f" {word}"):
            assert len(tokenizer(text).input_ids) == 1, text


@pytest.mark.parametrize("text", ["Où est le chat noir ?", "漢字 🙂", "a\n\n b\tc", "x" * 50, "<|im_star", "3.14"])
def test_any_text_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text
