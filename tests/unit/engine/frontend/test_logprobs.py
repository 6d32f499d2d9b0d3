"""A token's bytes are what the token adds to a text, however the tokenizer stores its pieces."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.unit.engine.frontend.test_output_processor import TOKENIZER
from vidspec_service.engine.frontend.tokens import LogprobsProcessor
from vidspec_service.engine.types import Logprob, TokenLogprob


@given(text=st.text(max_size=20))
def test_byte_level_pieces_add_up_to_the_text(text: str) -> None:
    processor = LogprobsProcessor(TOKENIZER)
    ids = TOKENIZER.encode(text).ids
    assert b"".join(processor.bytes_of(token) for token in ids) == text.encode()


@pytest.mark.parametrize("word", ["<|extra 0|>", "你好", "a\u2581"])
def test_a_word_in_a_byte_level_vocabulary_that_is_not_written_in_its_alphabet_is_told_as_it_is(word: str) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={word: 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert LogprobsProcessor(tokenizer).bytes_of(0) == word.encode() == tokenizer.decode([0]).encode()


def test_sentencepiece_pieces_have_spaces_and_single_bytes() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"\u2581red": 0, "<0xC3>": 1, "<0xA4>": 2, "é": 3}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    processor = LogprobsProcessor(tokenizer)
    assert [processor.bytes_of(token) for token in range(5)] == [b" red", b"\xc3", b"\xa4", "é".encode(), b"</s>"]


def test_what_json_cannot_say_is_very_unlikely() -> None:
    never = float("-inf")
    told = LogprobsProcessor(TOKENIZER).process((64, 65), (7, 8), ((-0.5, ((65, never),)), (never, ())))
    first, second = (LogprobsProcessor(TOKENIZER).bytes_of(token) for token in (64, 65))
    assert told == (
        TokenLogprob(offset=7, token=Logprob(first, -0.5), top=(Logprob(second, -9999.0),)),
        TokenLogprob(offset=8, token=Logprob(second, -9999.0), top=()),
    )


def test_the_garbage_collector_does_not_go_through_log_probabilities() -> None:
    """A long non-streamed answer has a million of them; each collection would block the event loop for longer."""
    (told,) = LogprobsProcessor(TOKENIZER).process((64,), (7,), ((-0.5, ((65, -1.0),)),))
    assert not any(gc.is_tracked(each) for each in (told, told.token, *told.top))
