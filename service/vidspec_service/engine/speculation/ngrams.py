"""Proposals without a draft model: what followed the same few tokens when they last occurred.

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding; `prompt_lookup_num_tokens` of transformers, `ngram` of
vLLM), over the prompt's words, the caller's earlier answers and the answer itself. Pure; knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

_LONGEST, _SHORTEST = 4, 2  # tokens that must be the same; more are more telling
_BREAK = -1  # between two texts


class NgramIndex:
    """Texts, and where each n-gram in them was last followed by something."""

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        self._tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}
        for text in texts:
            self._append(text)
            self._tokens.append(_BREAK)
        self._start = len(self._tokens)  # of the answer

    def continuation(self, answer: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that may follow the answer, which has grown since this was last asked."""
        self._append(answer[len(self._tokens) - self._start :])
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            found = self._followed_at.get(tuple(self._tokens[-length:]))
            if found is not None:
                return list(takewhile(lambda token: token != _BREAK, self._tokens[found : found + most]))
        return []

    def _append(self, text: Sequence[int]) -> None:
        for token in text:
            end = len(self._tokens)
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                gram = tuple(self._tokens[end - length :])
                if _BREAK in gram:
                    break
                self._followed_at[gram] = end
            self._tokens.append(token)
