"""Text comes out whole: no split character and no part of a stop string, whatever the token boundaries are.

A stream's texts join to the text of all its tokens; bytes that form no character cost no other token its text.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.unit.engine.frontend.test_output_processor import TOKENIZER
from vidspec_service.engine.frontend.output_processor import DecodeStream, Detokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer like Llama's: some words, and bytes for everything else."""
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "é"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="</s>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


LLAMA = byte_fallback_tokenizer()
VOCABULARY = LLAMA.get_vocab()
WORDS = ["\u2581", "a", "\u2581a", "é", "</s>"]


def ids_of(*pieces: str) -> list[int]:
    return [VOCABULARY[piece] for piece in pieces]


def in_bytes(text: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in text.encode()]


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = DecodeStream(tokenizer)
    return [*(stream.step(token) for token in ids), stream.rest()]


@given(st.lists(st.sampled_from(WORDS).map(lambda word: [word]) | st.text("\n ä中🎬", max_size=3).map(in_bytes)))
def test_characters_in_bytes_come_whole_between_words(parts: list[list[str]]) -> None:
    ids = ids_of(*(piece for part in parts for piece in part))
    texts = streamed(LLAMA, ids)
    assert "".join(texts) == LLAMA.decode(ids)
    assert not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("count", [1, 200])
def test_a_word_keeps_its_space_however_many_end_tokens_were_ignored_before_it(count: int) -> None:
    ids = ids_of("\u2581a", *["</s>"] * count, "\u2581a")
    assert "".join(streamed(LLAMA, ids)) == LLAMA.decode(ids) == "a a"


@given(st.lists(st.integers(0, 255)))
def test_any_bytes_are_told_as_the_tokenizer_tells_them_together(ids: list[int]) -> None:
    texts = streamed(TOKENIZER, ids)
    assert "".join(texts) == TOKENIZER.decode(ids)
    assert not any(text.endswith("\ufffd") for text in texts[:-1])


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        (["<0x0A>", "<0xF0>", "\u2581a"], ["\n", "", "\ufffd a", ""]),
        (["a", "<0x41>", "<0xC3>", "<0xA4>", "<0xA4>", "a"], ["a", "A", "", "ä", "", "\ufffda", ""]),
        (["a", "<0x0A>", "<0xF0>"], ["a", "\n", "", "\ufffd"]),
    ],
)
def test_bytes_that_make_no_character_do_not_undo_those_before_them(pieces: list[str], texts: list[str]) -> None:
    assert streamed(LLAMA, ids_of(*pieces)) == texts


@given(st.lists(st.sampled_from([*WORDS, "<0x0A>", "<0xF0>", "<0xC3>"])))
def test_whatever_bytes_there_are_every_word_is_told(pieces: list[str]) -> None:
    text = "".join(streamed(LLAMA, ids_of(*pieces)))
    words = "".join(piece for piece in pieces if piece in WORDS[:-1]).replace("\u2581", " ")
    assert text.replace("\ufffd", "").replace("\n", "") in (words, words.removeprefix(" "))


@pytest.mark.parametrize("piece", ["<0xF0>", "</s>"])
def test_tokens_that_say_nothing_are_not_read_again_with_each_that_follows(piece: str) -> None:
    stream, longest = DecodeStream(LLAMA), 0
    for token in ids_of(*[piece] * 1000):
        stream.step(token)
        longest = max(longest, len(stream._held))
    assert longest < 100
    assert "a" in stream.step(*ids_of("a"))


def chunked(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, at = [], 0
    for size in sizes:
        chunks.append(ids[at : at + size])
        at += size
    return [*chunks, ids[at:]]


@given(text=st.text(alphabet="ab é🎬.", max_size=30), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_increments_add_up_to_the_text_and_never_tear_a_character(text: str, sizes: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER, ())
    parts = [detokenizer.push(chunk) for chunk in chunked(TOKENIZER.encode(text).ids, sizes)]
    parts.append(detokenizer.finish())
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)


@given(
    text=st.text(alphabet="abc", max_size=30),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), max_size=20),
)
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str], sizes: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER, stop)
    shown = ""
    for chunk in chunked(TOKENIZER.encode(text).ids, sizes):
        shown += detokenizer.push(chunk)
        assert not any(word in shown for word in stop)
    shown += detokenizer.finish()
    # The stop string that completes first wins; of two that complete together, the one that starts first.
    ends = [
        (end, text.find(word, 0, end)) for end in range(len(text) + 1) for word in stop if text[:end].endswith(word)
    ]
    if not ends:
        assert shown == text
        assert not detokenizer.is_stopped
    else:
        first = min(end for end, _ in ends)
        starts = [first - len(word) for word in stop if text[:first].endswith(word)]
        assert shown == text[: min(starts)]
        assert detokenizer.is_stopped


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    detokenizer = Detokenizer(TOKENIZER, ("b",))
    detokenizer.push(TOKENIZER.encode("aabaa").ids)
    assert detokenizer.num_tokens == 3


def test_an_incomplete_character_at_the_end_is_not_lost() -> None:
    detokenizer = Detokenizer(TOKENIZER, ())
    ids = TOKENIZER.encode("é").ids[:1]
    assert detokenizer.push(ids) + detokenizer.finish() == "\ufffd"


def test_a_stop_token_is_counted_and_says_nothing() -> None:
    ids = TOKENIZER.encode("ab").ids
    detokenizer = Detokenizer(TOKENIZER, (), stop_token_ids=ids[1:])
    assert detokenizer.push(ids) + detokenizer.finish() == "a"
    assert detokenizer.num_tokens == 2


@given(text=st.text(alphabet="ab é🎬.", max_size=30), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_a_token_begins_after_the_characters_before_it_and_a_part_of_a_character_with_it(
    text: str, sizes: list[int]
) -> None:
    detokenizer, offsets = Detokenizer(TOKENIZER, (".a",)), list[int]()
    for chunk in chunked(TOKENIZER.encode(text).ids, sizes):
        detokenizer.push(chunk)
        offsets += detokenizer.offsets
    written = text.encode()
    assert offsets == [len(written[:at].decode(errors="ignore")) for at in range(detokenizer.num_tokens)]


def test_a_token_begins_where_its_text_does_where_its_tokenizer_leaves_out_a_space_or_an_end_token() -> None:
    detokenizer = Detokenizer(LLAMA, ())
    assert detokenizer.push(ids_of("\u2581a", "\u2581a", "</s>", "</s>", "a")) == "a aa"
    assert detokenizer.offsets == [0, 1, 3, 3, 3]


def test_a_token_with_a_letter_and_half_a_character_ends_within_that_character() -> None:
    pieces = ["\u0120\u00c3", "\u00a9", "a"]  # a space and the first byte of "é"; its second
    tokenizer = Tokenizer(models.BPE(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    detokenizer = Detokenizer(tokenizer, ())
    assert detokenizer.push([2, 0, 1, 2]) == "a éa"
    assert detokenizer.offsets == [0, 1, 2, 3]
