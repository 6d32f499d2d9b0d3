"""What n-grams propose is what followed them last, in the longest one that is known; nothing is made up."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.engine.speculation.ngrams import NgramIndex

TEXT = st.lists(st.integers(0, 3), max_size=20)


def searched(texts: Sequence[Sequence[int]], answer: Sequence[int], most: int) -> list[int]:
    """By looking everywhere."""
    for length in (4, 3, 2):
        suffix = list(answer[-length:])
        if len(suffix) < length:
            continue
        for text in (answer, *reversed(texts)):
            for end in range(len(text) - 1, length - 1, -1):
                if list(text[end - length : end]) == suffix:
                    return list(text[end : end + most])
    return []


@given(texts=st.lists(TEXT, max_size=3), answer=TEXT, cuts=st.lists(st.integers(0, 20)), most=st.integers(1, 8))
def test_the_last_place_of_the_longest_known_ngram_is_continued(
    texts: list[list[int]], answer: list[int], cuts: list[int], most: int
) -> None:
    index = NgramIndex(texts)
    for cut in sorted(cuts):  # whenever it was asked before
        index.continuation(answer[:cut], most)
    assert index.continuation(answer, most) == searched(texts, answer, most)
